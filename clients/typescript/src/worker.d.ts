/** Somebody has cancelled the run: the task has to stop. */
export class Cancelled extends Error {
    constructor();
}
/** The lease has ended: another worker may have the task. Nothing that this attempt does counts any more. */
export class LeaseLost extends Error {
    constructor();
}
/** The worker stops. It gives the task back, which costs the task no attempt. */
export class Stopped extends Error {
    constructor();
}
/** Throw it in a handler: the step has failed for good. */
export class Permanent extends Error {
    /**
     * @param {string} code
     * @param {string} message
     */
    constructor(code: string, message: string);
    code: string;
}
/** Throw it in a handler: the attempt failed, and the step is tried again. `after`: seconds until then. */
export class Retryable extends Error {
    /**
     * @param {string} message
     * @param {{ code?: string, after?: number }} [options]
     */
    constructor(message: string, { code, after }?: {
        code?: string;
        after?: number;
    });
    code: string;
    after: number | undefined;
}
/** A leased task. */
export class Task {
    /**
     * @param {Claim} claim
     * @param {(verb: string, body: object, options?: object) => Promise<any>} ask
     * @param {typeof globalThis.fetch} fetch
     */
    constructor(claim: Claim, ask: (verb: string, body: object, options?: object) => Promise<any>, fetch: typeof globalThis.fetch);
    claim: Claim;
    get id(): string;
    get step(): string;
    /** The run's payload. */
    get payload(): Record<string, unknown>;
    /** `{step: result}` of the steps that this step needs. */
    get results(): Record<string, unknown>;
    /** The files of those steps. */
    get files(): InputFile[];
    /**
     * Aborted when the task has to stop. Its `reason` is a Cancelled, a LeaseLost or a Stopped. Pass it to `fetch` and to
     * whatever else waits.
     */
    get signal(): AbortSignal;
    /** Throws Cancelled, LeaseLost or Stopped once the task has to stop. */
    checkpoint(): void;
    /**
     * How far the step is, 0 to 100. Rejects with LeaseLost, ApiError, Unavailable.
     * @param {number} percent
     * @param {string} [summary]
     */
    progress(percent: number, summary?: string): Promise<void>;
    /**
     * Add a line to the run's log: sent within a second, and before the task is settled. It is dropped if too many lines wait
     * until the API accepts them; a later line of the log says how many were dropped. Of `fields` the first 32 are kept. Throws
     * RangeError for another level, and TypeError for fields that are not JSON.
     * @param {string} message
     * @param {{ level?: Level, trace?: string, fields?: Record<string, unknown> }} [options]
     */
    log(message: string, { level, trace, fields }?: {
        level?: Level;
        trace?: string;
        fields?: Record<string, unknown>;
    }): void;
    /**
     * As `log`, at the level `error`, but the line is kept however many wait: it says why the attempt failed.
     * @param {string} message
     * @param {string} trace
     */
    logFailure(message: string, trace: string): void;
    /**
     * Append a chunk (a text, or another JSON value) to the run's stream, which clients follow. False: the chunk is dropped.
     * Either the attempt has emitted too much, and the stream is cut; or too many chunks wait until the API accepts them, and a
     * later line of the log says how many were dropped. NUL and half characters are taken out of a text, as in a line of the log.
     * Throws TypeError for another value with one of them, and for what is not JSON.
     * @param {unknown} chunk
     * @returns {boolean}
     */
    emit(chunk: unknown): boolean;
    /**
     * Read a file that a needed step has stored. `step`: that step, if several have a file of this name. Rejects with
     * RangeError for an unknown file, with Retryable `file_unreadable` if the store refuses or does not answer, and with
     * Retryable `file_corrupt` for bytes with another SHA-256.
     * @param {string} name
     * @param {{ step?: string }} [options]
     * @returns {Promise<Uint8Array>}
     */
    read(name: string, { step }?: {
        step?: string;
    }): Promise<Uint8Array>;
    /**
     * Upload a file. Others see it once the task is completed. Rejects with LeaseLost, ApiError, Unavailable, and with
     * Retryable `file_unwritable` if the store refuses or does not answer.
     * @param {string} name
     * @param {Uint8Array | string} data a text is stored as UTF-8
     * @param {string} [contentType]
     */
    write(name: string, data: Uint8Array | string, contentType?: string): Promise<void>;
    /** The files that `write` has uploaded. */
    get sent(): {
        name: string;
        sha256: string;
    }[];
    /**
     * Send a request about this task, under its lease. Rejects with LeaseLost, ApiError, Unavailable.
     * @param {string} verb
     * @param {object} [body]
     * @param {object} [options] of `Leasehold.request`
     */
    post(verb: string, body?: object, options?: object): Promise<any>;
    /**
     * Send what was logged and emitted. What the API refuses is dropped, and a line of the log says so, and another one what
     * `log` and `emit` have dropped. Rejects with LeaseLost, Unavailable, and with ApiError if the API refuses the key or has
     * failed itself.
     */
    flush(): Promise<void>;
    /**
     * Send what was logged and emitted, and give the task back, within so many milliseconds. A silent
     * request with output does not use up the time. Rejects as `flush`, and with a DOMException when the time is up.
     * @param {number} milliseconds
     */
    release(milliseconds: number): Promise<void>;
    /**
     * Tell the handler to stop. The first reason stays.
     * @param {Cancelled | Stopped} reason
     */
    stop(reason: Cancelled | Stopped): void;
    #private;
}
/** Works on the tasks of queues, one at a time. */
export class ExternalWorker {
    /**
     * `leaseSeconds`: how long a lease lasts without a heartbeat. A heartbeat is sent three times in that time.
     * `graceSeconds`: how long a handler may still work, and the API take to accept its result, after the worker was told to
     * stop. `waitSeconds`, up to 30: how long one claim waits for a task; a stop waits for it, because a claim that nobody waits
     * for would lease a task to nobody.
     * @param {Leasehold} leasehold
     * @param {{ queues: string[], leaseSeconds?: number, graceSeconds?: number, waitSeconds?: number,
     *   fetch?: typeof globalThis.fetch }} options `fetch`: for the store's signed URLs, which do not get the API key
     */
    constructor(leasehold: Leasehold, { queues, leaseSeconds, graceSeconds, waitSeconds, fetch }: {
        queues: string[];
        leaseSeconds?: number;
        graceSeconds?: number;
        waitSeconds?: number;
        fetch?: typeof globalThis.fetch;
    });
    /** A new id for each start. */
    id: string;
    /**
     * Work until `signal` is aborted; then stop the handler and give its task back. While the API does not answer, or has no
     * room, wait and try again. Wait also after a task that the API does not let this worker settle, and after an empty answer
     * that came before a claim had waited. Rejects with ApiError if the
     * API refuses the key or the queues, and if it refuses all settlements of three tasks in a row. For example, a proxy lets only
     * the claims through: the worker would run each task of the queue for nothing.
     * @param {Handler} handle
     * @param {Stoppable} [options]
     * @returns {Promise<void>}
     */
    serve(handle: Handler, { signal }?: Stoppable): Promise<void>;
    /**
     * Claim a task, do it and settle it. False: none was due within `wait` seconds, which are 30 at most.
     * @param {Handler} handle
     * @param {{ wait?: number } & Stoppable} [options]
     * @returns {Promise<boolean>}
     */
    workOnce(handle: Handler, { wait, signal }?: {
        wait?: number;
    } & Stoppable): Promise<boolean>;
    #private;
}
export type Leasehold = import("./index.js").Leasehold;
export type Schemas = import("./schema.d.ts").components["schemas"];
export type InputFile = {
    step: string;
    name: string;
    size: number;
    sha256: string;
    content_type: string;
    url: string;
};
/**
 * A task as the API's answer to the claim describes it.
 */
export type Claim = {
    task_id: string;
    run_id: string;
    template: string;
    version: number | string;
    step: string;
    queue: string;
    epoch: number;
    attempt: number;
    lease_seconds: number;
    timeout_seconds: number | null;
    payload: Record<string, unknown>;
    traceparent: string | null;
    results: Record<string, unknown>;
    files: InputFile[];
};
export type Result = Record<string, unknown>;
export type Handler = (task: Task) => Promise<Result | null | void> | Result | null | void;
export type Level = "debug" | "info" | "warning" | "error" | "critical";
export type Stoppable = {
    signal?: AbortSignal;
};
