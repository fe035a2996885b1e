/** The API refused the request. `code` is stable, for programs. */
export class ApiError extends Error {
    /**
     * @param {number} status
     * @param {{ code?: string, detail?: string, errors?: unknown[] }} problem
     * @param {string | undefined} key
     */
    constructor(status: number, problem: {
        code?: string;
        detail?: string;
        errors?: unknown[];
    }, key: string | undefined);
    status: number;
    code: string;
    errors: unknown[];
    key: string | undefined;
}
/** No answer in time. Send the request again with `key`: what an earlier try has done is not done twice. */
export class Unavailable extends Error {
    /**
     * @param {string} message
     * @param {string | undefined} key
     */
    constructor(message: string, key: string | undefined);
    key: string | undefined;
}
/** A job that was waited for has not succeeded. A cancelled job has no error. */
export class JobFailed extends Error {
    /** @param {Job} job */
    constructor(job: Job);
    job: {
        id: string;
        kind: string;
        template: string;
        status: import("./schema.d.ts").components["schemas"]["JobState"];
        tenant_id: string;
        priority: "high" | "normal" | "low";
        tags: {
            [key: string]: string;
        };
        held: boolean;
        deleting: boolean;
        created_at: string;
        started_at?: string | null;
        finished_at?: string | null;
        deadline_at?: string | null;
        expires_at?: string | null;
        error?: import("./schema.d.ts").components["schemas"]["JobError"] | null;
        cancel?: {
            [key: string]: unknown;
        } | null;
        cancel_requested_at?: string | null;
        run?: import("./schema.d.ts").components["schemas"]["RunPart"] | null;
        schedule?: import("./schema.d.ts").components["schemas"]["SchedulePart"] | null;
        updated_at: string;
        parameters: {
            [key: string]: unknown;
        };
        redacted: string[];
        steps: import("./schema.d.ts").components["schemas"]["leasehold__api__jobs__schemas__StepAnswer"][];
        outputs: import("./schema.d.ts").components["schemas"]["OutputAnswer"][];
        result: {
            [key: string]: unknown;
        };
        waits_for: import("./schema.d.ts").components["schemas"]["Waiting"][];
        parent?: import("./schema.d.ts").components["schemas"]["Parent"] | null;
        callback?: import("./schema.d.ts").components["schemas"]["Callback"] | null;
    };
}
export class Leasehold {
    /**
     * `timeout`: for how many seconds a request is tried again while the API does not answer (503, a lost connection) or has
     * no room (429). Throws TypeError for a URL or a key that no request can hold.
     * @param {{ url: string, key: string, timeout?: number, fetch?: typeof globalThis.fetch }} options
     */
    constructor({ url, key, timeout, fetch }: {
        url: string;
        key: string;
        timeout?: number;
        fetch?: typeof globalThis.fetch;
    });
    /**
     * Start a run. With an idempotency key, by default a new one: so it is started once, however often the request is sent.
     * @param {RunRequest} run
     * @param {Keyed} [options]
     * @returns {Promise<RunAccepted>}
     */
    submit(run: RunRequest, { key }?: Keyed): Promise<RunAccepted>;
    /**
     * Start up to 1,000 runs of a template: all or none.
     * @param {BatchRequest} batch
     * @param {Keyed} [options]
     * @returns {Promise<BatchAccepted>}
     */
    submitMany(batch: BatchRequest, { key }?: Keyed): Promise<BatchAccepted>;
    /**
     * Send a signal to a run whose workflow waits for it, or will wait. The workflow consumes each signal once.
     * @param {string} id
     * @param {string} name
     * @param {unknown} [payload]
     * @param {Keyed} [options]
     * @returns {Promise<void>}
     */
    signal(id: string, name: string, payload?: unknown, { key }?: Keyed): Promise<void>;
    /**
     * `wait`: seconds, up to 30, to wait for the job's next change.
     * @param {string} id
     * @param {{ wait?: number }} [options]
     * @returns {Promise<Job>}
     */
    get(id: string, { wait }?: {
        wait?: number;
    }): Promise<Job>;
    /**
     * All jobs that the filter finds, the newest first: `kind:media status:failed created:<1h`.
     * @param {string} [q]
     * @returns {AsyncGenerator<JobSummary, void>}
     */
    jobs(q?: string): AsyncGenerator<JobSummary, void>;
    /**
     * @param {string} id
     * @returns {Promise<{ reasons: { code: string, message: string }[], ledger: unknown[] }>}
     */
    explain(id: string): Promise<{
        reasons: {
            code: string;
            message: string;
        }[];
        ledger: unknown[];
    }>;
    /**
     * @param {string} id
     * @param {string} [reason]
     * @returns {Promise<JobAfterAction>}
     */
    cancel(id: string, reason?: string): Promise<JobAfterAction>;
    /**
     * @param {string} id
     * @param {{ from_step?: string, payload?: Record<string, unknown> }} [options]
     * @returns {Promise<JobAfterAction>}
     */
    retry(id: string, options?: {
        from_step?: string;
        payload?: Record<string, unknown>;
    }): Promise<JobAfterAction>;
    /**
     * Delete a job with its objects. `null`: it is gone; else it goes when its running steps have stopped.
     * @param {string} id
     * @returns {Promise<JobAfterAction | null>}
     */
    delete(id: string): Promise<JobAfterAction | null>;
    /**
     * The job once it has ended. Rejects with Unavailable after `timeout` seconds, also while the API does not answer. The
     * error comes up to 10 seconds later if the API keeps a connection open without an answer.
     * @param {string} id
     * @param {{ timeout?: number }} [options]
     * @returns {Promise<Job>}
     */
    wait(id: string, { timeout }?: {
        timeout?: number;
    }): Promise<Job>;
    /**
     * `{step: result}` of the job once it has succeeded: of all steps of a run, which the key must be able to read as such
     * (`runs:read`) if there are 1,000 or more; of the first 1,000 steps of another job. Rejects with JobFailed.
     * @param {string} id
     * @param {{ timeout?: number }} [options]
     */
    result(id: string, options?: {
        timeout?: number;
    }): Promise<{
        [key: string]: unknown;
    }>;
    /**
     * The events of a job as they happen, up to its last.
     * @param {string} id
     * @param {{ after?: number, signal?: AbortSignal }} [options]
     * @returns {AsyncGenerator<JobEvent, void>}
     */
    events(id: string, options?: {
        after?: number;
        signal?: AbortSignal;
    }): AsyncGenerator<JobEvent, void>;
    /**
     * What a job logs, as it is written, until it ends.
     * @param {string} id
     * @param {{ after?: number, step?: string, attempt?: number, signal?: AbortSignal }} [options]
     * @returns {AsyncGenerator<LogLine, void>}
     */
    logs(id: string, { step, attempt, ...options }?: {
        after?: number;
        step?: string;
        attempt?: number;
        signal?: AbortSignal;
    }): AsyncGenerator<LogLine, void>;
    /**
     * What a job emits, as it is written, until it ends.
     * @param {string} id
     * @param {{ after?: number, step?: string, attempt?: number, signal?: AbortSignal }} [options]
     * @returns {AsyncGenerator<Chunk, void>}
     */
    stream(id: string, { step, attempt, ...options }?: {
        after?: number;
        step?: string;
        attempt?: number;
        signal?: AbortSignal;
    }): AsyncGenerator<Chunk, void>;
    /**
     * Send a request, and again while that may help. `keyed`: the API knows an idempotency key for it; `safe`: it may be
     * repeated without one. `done`: how the API answers a repetition of what is done, if not as the first try. `within`:
     * the seconds for which the caller waits, if that is shorter than the client's timeout. With it the API is asked to hold a
     * request with `wait` no longer than the caller waits, and so that the answer comes before the end of the try.
     * @param {string} method
     * @param {string} path
     * @param {RequestOptions} [options]
     * @returns {Promise<any>}
     */
    request(method: string, path: string, options?: RequestOptions): Promise<any>;
    #private;
}
export type Schemas = import("./schema.d.ts").components["schemas"];
export type Job = Schemas["JobAnswer"];
export type JobSummary = Schemas["JobSummary"];
export type RunAccepted = Schemas["RunAccepted"];
export type BatchAccepted = Schemas["BatchAccepted"];
export type JobEvent = Schemas["EventItem"];
export type LogLine = Schemas["LogLine"];
export type RunRequest = Partial<Schemas["RunRequest"]> & {
    template: string;
};
export type BatchRequest = Partial<Schemas["BatchRequest"]> & {
    template: string;
    runs: Partial<Schemas["BatchItem"]>[];
};
export type JobAfterAction = {
    id: string;
    status: string;
};
/**
 * An item of a job's stream. After `restart` the chunks of the step's earlier attempts are void.
 */
export type Chunk = {
    event: "chunk" | "restart" | "cut";
    step: string;
    attempt: number;
    epoch: number;
    n?: number;
    chunk?: unknown;
};
export type Keyed = {
    key?: string;
};
export type RequestOptions = {
    query?: Record<string, string | number | boolean | undefined>;
    body?: unknown;
    keyed?: boolean;
    safe?: boolean;
    key?: string;
    headers?: Record<string, string>;
    signal?: AbortSignal;
    done?: Done;
    within?: number;
};
/**
 * `code`: with this code the API refuses a repetition if an earlier try has done the request. `read`: what the request then
 * resolves with.
 */
export type Done = {
    code: string;
    read: () => Promise<any>;
};
