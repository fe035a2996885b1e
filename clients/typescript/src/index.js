// @ts-check
/**
 * The API of Leasehold for JavaScript and TypeScript. Its types come from the API's document (`schema.d.ts`); this file adds
 * what a document cannot say: idempotency keys, retries, waiting, and streams that are resumed.
 */

/** @typedef {import("./schema.d.ts").components["schemas"]} Schemas */
/** @typedef {Schemas["JobAnswer"]} Job */
/** @typedef {Schemas["JobSummary"]} JobSummary */
/** @typedef {Schemas["RunAccepted"]} RunAccepted */
/** @typedef {Schemas["BatchAccepted"]} BatchAccepted */
/** @typedef {Schemas["EventItem"]} JobEvent */
/** @typedef {Schemas["LogLine"]} LogLine */
/** @typedef {Partial<Schemas["RunRequest"]> & { template: string }} RunRequest */
/** @typedef {Partial<Schemas["BatchRequest"]> & { template: string, runs: Partial<Schemas["BatchItem"]>[] }} BatchRequest */
/** @typedef {{ id: string, status: string }} JobAfterAction */
/**
 * An item of a job's stream. After `restart` the chunks of the step's earlier attempts are void.
 * @typedef {{ event: "chunk" | "restart" | "cut", step: string, attempt: number, epoch: number, n?: number, chunk?: unknown }} Chunk
 */
/** @typedef {{ key?: string }} Keyed */
/** @typedef {{ query?: Record<string, string | number | boolean | undefined>, body?: unknown, keyed?: boolean, safe?: boolean, key?: string, headers?: Record<string, string>, signal?: AbortSignal, done?: Done, within?: number }} RequestOptions */
/**
 * `code`: with this code the API refuses a repetition if an earlier try has done the request. `read`: what the request then
 * resolves with.
 * @typedef {{ code: string, read: () => Promise<any> }} Done
 */

const ENDED = new Set(["succeeded", "failed", "cancelled", "expired"]);
const AWAY = new Set([502, 503, 504]);
const UNSENT = new Set(["ECONNREFUSED", "ENOTFOUND", "UND_ERR_CONNECT_TIMEOUT", "UND_ERR_REQ_CONTENT_LENGTH_MISMATCH"]);
const FIRST_PAUSE = 200;
const LAST_PAUSE = 10_000;
/** How long the API holds a request that waits for a change. Then the client sends the request again. */
const WAIT_SECONDS = 20;
/** An answer that takes fewer milliseconds has come at once: the API has not held its request. */
const AT_ONCE = 500;
/** The API's answer about a job has at most so many steps. */
const MOST_STEPS = 1_000;
/** How long one try of a request may take: longer than the API holds any request. */
const TRY = 60_000;
/** How long an answer may take after the time for which the API holds the request. */
const ANSWER = 10_000;
/** Another cell serves the tenant. The answer has its address. */
const WRONG_CELL = 421;

/** The API refused the request. `code` is stable, for programs. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {{ code?: string, detail?: string, errors?: unknown[] }} problem
   * @param {string | undefined} key
   */
  constructor(status, problem, key) {
    super(`${problem.code ?? `http_${status}`}: ${problem.detail ?? "The API gave no reason."}`);
    this.name = "ApiError";
    this.status = status;
    this.code = problem.code ?? `http_${status}`;
    this.errors = problem.errors ?? [];
    this.key = key;
  }
}

/** No answer in time. Send the request again with `key`: what an earlier try has done is not done twice. */
export class Unavailable extends Error {
  /**
   * @param {string} message
   * @param {string | undefined} key
   */
  constructor(message, key) {
    super(message);
    this.name = "Unavailable";
    this.key = key;
  }
}

/** A job that was waited for has not succeeded. A cancelled job has no error. */
export class JobFailed extends Error {
  /** @param {Job} job */
  constructor(job) {
    super(`job ${job.id} ${job.status}: ${job.error?.code ?? job.status}: ${job.error?.message ?? "It has no error."}`);
    this.name = "JobFailed";
    this.job = job;
  }
}

export class Leasehold {
  #url;
  #key;
  #timeout;
  #fetch;

  /**
   * `timeout`: for how many seconds a request is tried again while the API does not answer (503, a lost connection) or has
   * no room (429). Throws TypeError for a URL or a key that no request can hold.
   * @param {{ url: string, key: string, timeout?: number, fetch?: typeof globalThis.fetch }} options
   */
  constructor({ url, key, timeout = 60, fetch = globalThis.fetch }) {
    if (!url || !key) throw new TypeError("new Leasehold({ url, key }) needs the URL of the API and an API key");
    this.#url = url.replace(/\/+$/, "");
    this.#key = key.trim();
    checkAddress(this.#url);
    // The error of `fetch` would show the key.
    if (!/^[!-~]+$/.test(this.#key)) throw new TypeError("the API key has characters that no key has: copy the whole key");
    this.#timeout = timeout * 1000;
    this.#fetch = /** @type {typeof fetch} */ ((...request) => fetch(...request)); // a browser's refuses a receiver
  }

  /**
   * Start a run. With an idempotency key, by default a new one: so it is started once, however often the request is sent.
   * @param {RunRequest} run
   * @param {Keyed} [options]
   * @returns {Promise<RunAccepted>}
   */
  submit(run, { key } = {}) {
    return this.request("POST", "/v1/runs", { body: run, keyed: true, key });
  }

  /**
   * Start up to 1,000 runs of a template: all or none.
   * @param {BatchRequest} batch
   * @param {Keyed} [options]
   * @returns {Promise<BatchAccepted>}
   */
  submitMany(batch, { key } = {}) {
    return this.request("POST", "/v1/runs/batch", { body: batch, keyed: true, key });
  }

  /**
   * Send a signal to a run whose workflow waits for it, or will wait. The workflow consumes each signal once.
   * @param {string} id
   * @param {string} name
   * @param {unknown} [payload]
   * @param {Keyed} [options]
   * @returns {Promise<void>}
   */
  async signal(id, name, payload = null, { key } = {}) {
    const path = `/v1/runs/${encodeURIComponent(id)}/signals/${encodeURIComponent(name)}`;
    await this.request("POST", path, { body: { payload }, keyed: true, key });
  }

  /**
   * `wait`: seconds, up to 30, to wait for the job's next change.
   * @param {string} id
   * @param {{ wait?: number }} [options]
   * @returns {Promise<Job>}
   */
  get(id, { wait } = {}) {
    return this.request("GET", `/v1/jobs/${encodeURIComponent(id)}`, { query: { wait }, safe: true });
  }

  /**
   * All jobs that the filter finds, the newest first: `kind:media status:failed created:<1h`.
   * @param {string} [q]
   * @returns {AsyncGenerator<JobSummary, void>}
   */
  async *jobs(q = "") {
    /** @type {string | undefined} */
    let cursor;
    do {
      const page = await this.request("GET", "/v1/jobs", { query: { q, cursor, limit: 100 }, safe: true });
      yield* page.jobs;
      cursor = page.next_cursor ?? undefined;
    } while (cursor !== undefined);
  }

  /**
   * @param {string} id
   * @returns {Promise<{ reasons: { code: string, message: string }[], ledger: unknown[] }>}
   */
  explain(id) {
    return this.request("GET", `/v1/jobs/${encodeURIComponent(id)}/explain`, { safe: true });
  }

  /**
   * @param {string} id
   * @param {string} [reason]
   * @returns {Promise<JobAfterAction>}
   */
  cancel(id, reason = "") {
    const read = async () => {
      const job = await this.get(id);
      return { id: job.id, status: job.status };
    };
    const done = { code: "resource_invalid_state", read };
    return this.request("POST", `/v1/jobs/${encodeURIComponent(id)}/cancel`, { body: { reason }, safe: true, done });
  }

  /**
   * @param {string} id
   * @param {{ from_step?: string, payload?: Record<string, unknown> }} [options]
   * @returns {Promise<JobAfterAction>}
   */
  retry(id, options = {}) {
    return this.request("POST", `/v1/jobs/${encodeURIComponent(id)}/retry`, { body: options });
  }

  /**
   * Delete a job with its objects. `null`: it is gone; else it goes when its running steps have stopped.
   * @param {string} id
   * @returns {Promise<JobAfterAction | null>}
   */
  delete(id) {
    const done = { code: "job_deleted", read: async () => null };
    return this.request("DELETE", `/v1/jobs/${encodeURIComponent(id)}`, { safe: true, done });
  }

  /**
   * The job once it has ended. Rejects with Unavailable after `timeout` seconds, also while the API does not answer. The
   * error comes up to 10 seconds later if the API keeps a connection open without an answer.
   * @param {string} id
   * @param {{ timeout?: number }} [options]
   * @returns {Promise<Job>}
   */
  async wait(id, { timeout = Infinity } = {}) {
    const until = Date.now() + timeout * 1000;
    const query = { wait: WAIT_SECONDS };
    /** The job as the last answer described it, and the answers in a row that came at once and said nothing new. */
    let before = "";
    let idle = 0;
    for (;;) {
      const sentAt = Date.now();
      const within = Math.max(0, (until - sentAt) / 1000);
      const job = await this.request("GET", `/v1/jobs/${encodeURIComponent(id)}`, { query, safe: true, within });
      if (ENDED.has(job.status)) return job;
      const now = Date.now();
      if (now >= until) throw new Unavailable(`job ${id} has not ended after ${timeout} s`, undefined);
      const seen = JSON.stringify({ ...job, outputs: undefined }); // the links of outputs differ from answer to answer
      // A proxy may drop `wait`, and an API that stops holds no request.
      if (seen === before && now - sentAt < AT_ONCE) await sleep(Math.min(pauseAfter(idle++), until - now), undefined);
      else idle = 0;
      before = seen;
    }
  }

  /**
   * `{step: result}` of the job once it has succeeded: of all steps of a run, which the key must be able to read as such
   * (`runs:read`) if there are 1,000 or more; of the first 1,000 steps of another job. Rejects with JobFailed.
   * @param {string} id
   * @param {{ timeout?: number }} [options]
   */
  async result(id, options) {
    const job = await this.wait(id, options);
    if (job.status !== "succeeded") throw new JobFailed(job);
    return job.run && job.steps.length >= MOST_STEPS ? this.#resultOfRun(id) : job.result;
  }

  /**
   * @param {string} id
   * @returns {Promise<Job["result"]>}
   */
  async #resultOfRun(id) {
    /** @type {Job["result"]} */
    const result = {};
    /** @type {string | undefined} */
    let cursor;
    do {
      const page = await this.request("GET", `/v1/runs/${encodeURIComponent(id)}`, { query: { cursor }, safe: true });
      Object.assign(result, page.result);
      cursor = page.progress.next_cursor ?? undefined;
    } while (cursor !== undefined);
    return result;
  }

  /**
   * The events of a job as they happen, up to its last.
   * @param {string} id
   * @param {{ after?: number, signal?: AbortSignal }} [options]
   * @returns {AsyncGenerator<JobEvent, void>}
   */
  async *events(id, options) {
    for await (const { data } of this.#follow(id, "events", {}, options)) yield /** @type {JobEvent} */ (data);
  }

  /**
   * What a job logs, as it is written, until it ends.
   * @param {string} id
   * @param {{ after?: number, step?: string, attempt?: number, signal?: AbortSignal }} [options]
   * @returns {AsyncGenerator<LogLine, void>}
   */
  async *logs(id, { step, attempt, ...options } = {}) {
    for await (const { data } of this.#follow(id, "logs", { step, attempt }, options)) {
      yield /** @type {LogLine} */ (data);
    }
  }

  /**
   * What a job emits, as it is written, until it ends.
   * @param {string} id
   * @param {{ after?: number, step?: string, attempt?: number, signal?: AbortSignal }} [options]
   * @returns {AsyncGenerator<Chunk, void>}
   */
  async *stream(id, { step, attempt, ...options } = {}) {
    for await (const { name, data } of this.#follow(id, "stream", { step, attempt }, options)) {
      yield /** @type {Chunk} */ ({ event: name, ...data });
    }
  }

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
  async request(method, path, options = {}) {
    const key = options.keyed ? (options.key ?? crypto.randomUUID()) : undefined;
    const send = this.#sender(method, path, { ...options, key });
    const { within = Infinity } = options;
    const repeatable = Boolean(options.keyed || options.safe);
    const tries = new Tries(Math.min(this.#timeout, within * 1000), repeatable, key, options.signal, within !== Infinity);
    const until = Date.now() + within * 1000;
    const wait = Number(options.query?.["wait"]); // NaN: the API does not hold the request
    const sendNext = () => {
      if (within === Infinity) return send(withTimeout(options.signal, TRY));
      const held = Math.min(wait, Math.max(0, until - Date.now()) / 1000, (tries.left + ANSWER / 2) / 1000);
      return send(withTimeout(options.signal, tries.left + ANSWER), Number.isNaN(held) ? {} : { wait: held });
    };
    for (;;) {
      let answer;
      try {
        answer = await tries.judge(sendNext);
      } catch (error) {
        if (!options.done || !tries.mayBeDone || !(error instanceof ApiError) || error.code !== options.done.code) throw error;
        // A key that may change the job may not read it: then the refusal is all that the API says.
        return options.done.read().catch((unread) => Promise.reject(unread instanceof ApiError ? error : unread));
      }
      const outcome = typeof answer === "number" ? answer : await tries.read(answer);
      if (typeof outcome !== "number") return outcome;
      await sleep(outcome, options.signal);
    }
  }

  /**
   * A function that sends the request, with these changes of its query. Throws TypeError at once for what cannot be sent, such
   * as a key that no header can hold: fetch throws the same error for a lost connection, and then the request is tried again.
   * @param {string} method
   * @param {string} path
   * @param {RequestOptions} options
   * @returns {(signal: AbortSignal | undefined, changes?: RequestOptions["query"]) => Promise<Response>}
   */
  #sender(method, path, { query = {}, body, key, headers = {} }) {
    const all = new Headers({ Authorization: `Bearer ${this.#key}`, ...headers });
    if (key !== undefined) all.set("Idempotency-Key", key);
    if (body !== undefined) all.set("Content-Type", "application/json");
    const fixed = { method, headers: all, ...(body === undefined ? {} : { body: JSON.stringify(body) }) };
    this.#addressOf(path, query);
    /** @type {(signal: AbortSignal | undefined, changes: RequestOptions["query"]) => Promise<Response>} */
    const sendOnce = (signal, changes) =>
      this.#fetch(this.#addressOf(path, { ...query, ...changes }), { ...fixed, ...(signal === undefined ? {} : { signal }) });
    return async (signal, changes) => {
      const answer = await sendOnce(signal, changes);
      if (answer.status !== WRONG_CELL || !this.#followCell(answer.headers.get("Leasehold-Cell-Address"))) return answer;
      await answer.body?.cancel();
      return sendOnce(signal, changes);
    };
  }

  /**
   * @param {string} path
   * @param {NonNullable<RequestOptions["query"]>} query
   */
  #addressOf(path, query) {
    const url = new URL(this.#url + path);
    for (const [name, value] of Object.entries(query)) {
      if (value !== undefined) url.searchParams.set(name, String(value));
    }
    return url;
  }

  /**
   * Whether requests go to this address from now on. The key never leaves https by it.
   * @param {string | null} address
   */
  #followCell(address) {
    if (address === null || !/^https?:\/\//.test(address)) return false;
    if (this.#url.startsWith("https:") && !address.startsWith("https:")) return false;
    this.#url = address.replace(/\/+$/, "");
    return true;
  }

  /**
   * A connection that breaks, or that the API ends, is resumed after the last item.
   * @param {string} id
   * @param {string} what
   * @param {Record<string, string | number | undefined>} query
   * @param {{ after?: number, signal?: AbortSignal }} [options]
   * @returns {AsyncGenerator<{ name: string, data: Record<string, unknown> }, void>}
   */
  async *#follow(id, what, query, { after = 0, signal } = {}) {
    const path = `/v1/jobs/${encodeURIComponent(id)}/${what}`;
    let last = String(after);
    /**
     * Of a connection that is not answered yet. A stream may be quiet for longer than `timeout`: the time counts from its loss.
     * @type {Tries | undefined}
     */
    let pending;
    /** Whether the job had ended before this connection began: then one without items is the last. */
    let hasEnded = false;
    /** Connections in a row that ended without an event while the job went on. A proxy may end each one at once. */
    let empty = 0;
    const tries = () => (pending ??= new Tries(this.#timeout, true, undefined, signal));
    for (;;) {
      const before = last;
      const headers = { Accept: "text/event-stream", "Last-Event-ID": last };
      const send = this.#sender("GET", path, { query, headers });
      const answer = await tries().judge(() => send(signal));
      if (typeof answer === "number") {
        await sleep(answer, signal);
        continue;
      }
      pending = undefined;
      try {
        for await (const event of serverEvents(answer)) {
          last = event.id ?? last;
          yield event;
        }
      } catch (error) {
        await sleep(tries().lost(error), signal);
        continue;
      }
      if (last !== before) {
        empty = 0;
        continue;
      }
      if (hasEnded) return;
      hasEnded = ENDED.has((await this.get(id)).status);
      if (!hasEnded) await sleep(pauseAfter(empty++), signal);
    }
  }
}

/** The tries of one request. */
class Tries {
  /** Whether the API may have got an earlier try. */
  mayBeDone = false;
  #failed = 0;
  #timeout;
  #repeatable;
  #key;
  #signal;
  #waitedFor;
  #until;

  /**
   * @param {number} timeout milliseconds
   * @param {boolean} repeatable whether a try whose answer was lost may be repeated
   * @param {string | undefined} key
   * @param {AbortSignal | undefined} signal the caller's: once it is aborted, no try follows
   * @param {boolean} [waitedFor] whether `timeout` is the caller's own: then its end is Unavailable, whatever the API answered
   */
  constructor(timeout, repeatable, key, signal, waitedFor = false) {
    this.#waitedFor = waitedFor;
    this.#signal = signal;
    this.#timeout = timeout;
    this.#repeatable = repeatable;
    this.#key = key;
    this.#until = Date.now() + timeout;
  }

  /** The milliseconds until no try follows. */
  get left() {
    return Math.max(0, this.#until - Date.now());
  }

  /**
   * The answer that counts, or the milliseconds until the next try.
   * @param {() => Promise<Response>} send
   * @returns {Promise<Response | number>}
   */
  async judge(send) {
    /** @type {Response} */
    let answer;
    try {
      answer = await send();
    } catch (error) {
      return this.lost(error);
    }
    if (answer.ok) return answer;
    const problem = objectOf(await answer.text().catch(() => "")) ?? {};
    const refused = new ApiError(answer.status, problem, this.#key);
    const early = answer.status === 429 || (answer.status === 409 && refused.code === "idempotency_key_in_flight");
    const away = AWAY.has(answer.status) && this.#repeatable;
    if (!early && !away) throw refused;
    this.mayBeDone ||= away; // a proxy lost the answer, or the API its connection to the database
    const pause = this.#pause(Number(answer.headers.get("Retry-After") ?? 0) * 1000 || 0);
    if (pause !== undefined) return pause;
    throw away || this.#waitedFor ? this.#unavailable(refused.message) : refused;
  }

  /**
   * The JSON object of an answer, or null if it has no content. Or the milliseconds until the next try, if the connection was
   * lost before the end of the answer. Throws ApiError for what is no JSON object, such as a proxy's page.
   * @param {Response} answer
   * @returns {Promise<Record<string, any> | null | number>}
   */
  async read(answer) {
    if (answer.status === 204) return null;
    /** @type {string} */
    let text;
    try {
      text = await answer.text();
    } catch (error) {
      return this.lost(error);
    }
    const found = objectOf(text);
    if (found !== undefined) return found;
    const detail = `${answer.url} answered without a JSON object: is it a Leasehold API?`;
    throw new ApiError(answer.status, { code: "answer_not_understood", detail }, this.#key);
  }

  /**
   * Milliseconds until the next try after a connection was lost. Throws Unavailable, and the reason of an abort.
   * @param {unknown} error
   */
  lost(error) {
    if (this.#signal?.aborted) throw this.#signal.reason;
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    // `fetch` says in `cause` that nothing was sent, or not all of the body: the API has done nothing then. Node loses a
    // request so when a refusal comes before the body was sent.
    const cause = /** @type {{ cause?: { code?: string }, message?: string }} */ (error ?? {});
    const unsent = UNSENT.has(cause.cause?.code ?? "");
    this.mayBeDone ||= !unsent;
    const pause = this.#repeatable || unsent ? this.#pause(0) : undefined;
    if (pause === undefined) throw this.#unavailable(cause.message ?? "the connection was lost");
    return pause;
  }

  /** @param {number} atLeast */
  #pause(atLeast) {
    const pause = atLeast + pauseAfter(this.#failed++);
    return Date.now() + pause < this.#until ? pause : undefined;
  }

  /** @param {string} reason */
  #unavailable(reason) {
    const hint = this.#key === undefined ? "" : ` Try again with the key ${this.#key}.`;
    const stopped = /[.!?]$/.test(reason) ? reason : `${reason}.`;
    return new Unavailable(`No answer for ${this.#timeout / 1000} s: ${stopped}${hint}`, this.#key);
  }
}

/**
 * The milliseconds until the next try, after one failure and `more` before it: random, below a bound that doubles with each.
 * @param {number} more
 */
function pauseAfter(more) {
  return Math.min(LAST_PAUSE, FIRST_PAUSE * 2 ** more) * (0.5 + Math.random() / 2);
}

/**
 * Throws TypeError for a URL that `fetch` never sends to: fetch throws the same error for it as for a lost connection.
 * @param {string} url
 */
function checkAddress(url) {
  const { protocol, username, password } = new URL(`${url}/`);
  if (protocol !== "http:" && protocol !== "https:") throw new TypeError("the API's URL must begin with http:// or https://");
  if (username || password) throw new TypeError("the API's URL must have no user and no password: the key is enough");
}

/**
 * The JSON object; undefined for another text.
 * @param {string} text
 * @returns {Record<string, any> | undefined}
 */
function objectOf(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? value : undefined;
  } catch {
    return undefined;
  }
}

/**
 * The server-sent events of an answer.
 * @param {Response} answer
 * @returns {AsyncGenerator<{ name: string, id?: string, data: Record<string, unknown> }, void>}
 */
async function* serverEvents(answer) {
  if (answer.body === null) return;
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  let rest = "";
  /** @type {Record<string, string>} */
  let fields = {};
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line === "") {
          if (fields["data"] !== undefined) {
            const id = fields["id"] === undefined ? {} : { id: fields["id"] };
            yield { name: fields["event"] ?? "message", ...id, data: JSON.parse(fields["data"]) };
          }
          fields = {};
        } else if (!line.startsWith(":")) {
          const at = line.indexOf(":");
          const name = at < 0 ? line : line.slice(0, at);
          const text = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
          fields[name] = name === "data" && fields[name] !== undefined ? `${fields[name]}\n${text}` : text;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => undefined); // the caller has left the loop, or the connection is lost already
  }
}

/**
 * The signal of one try: the caller's, and one that ends the try of a server that never answers.
 * @param {AbortSignal | undefined} signal
 * @param {number} [milliseconds]
 */
function withTimeout(signal, milliseconds = TRY) {
  if (signal !== undefined && !("any" in AbortSignal)) return signal; // Node.js before 20.3
  const timeout = AbortSignal.timeout(Math.ceil(Math.min(TRY, milliseconds)));
  return signal === undefined ? timeout : AbortSignal.any([signal, timeout]);
}

/**
 * Rejects with the reason of the signal once it is aborted.
 * @param {number} milliseconds
 * @param {AbortSignal | undefined} signal
 * @returns {Promise<void>}
 */
function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const timer = setTimeout(end, milliseconds);
    signal?.addEventListener("abort", end, { once: true });
    function end() {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      if (signal?.aborted) reject(signal.reason);
      else resolve();
    }
  });
}
