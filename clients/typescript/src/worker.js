// @ts-check
/**
 * A worker outside of the platform, in JavaScript or TypeScript. It claims tasks over HTTP, renews their leases, and settles
 * them. It sends the requests of `docs/guides/external-workers.md`, as `leasehold.ExternalWorker` does in Python.
 */
import { ApiError, Unavailable } from "./index.js";

/** @typedef {import("./index.js").Leasehold} Leasehold */
/** @typedef {import("./schema.d.ts").components["schemas"]} Schemas */
/** A file of a needed step. `url` is signed: it can be read for some minutes without the API key. */
/** @typedef {{ step: string, name: string, size: number, sha256: string, content_type: string, url: string }} InputFile */
/**
 * A task as the API's answer to the claim describes it.
 * @typedef {{
 *   task_id: string, run_id: string, template: string, version: number | string, step: string, queue: string, epoch: number,
 *   attempt: number, lease_seconds: number, timeout_seconds: number | null, payload: Record<string, unknown>,
 *   traceparent: string | null, results: Record<string, unknown>, files: InputFile[],
 * }} Claim
 */
/** @typedef {Record<string, unknown>} Result */
/** @typedef {(task: Task) => Promise<Result | null | void> | Result | null | void} Handler */
/** @typedef {"debug" | "info" | "warning" | "error" | "critical"} Level */
/** @typedef {{ signal?: AbortSignal }} Stoppable */

const OUTAGE = 2_000;
const OUTPUT_PAUSE = 500;
const GIVE_BACK = 5_000;
/** The part of the time to give a task back that its last lines and chunks may take. */
const OUTPUT_PART = 0.4;
/** `serve` ends once the API has refused all settlements of so many tasks in a row. */
const MOST_UNSETTLED = 3;
/** The API refuses these for every request of the key: no other settlement would be accepted. */
const KEY_REFUSED = new Set([401, 403]);
/** With these the API refuses what a request contains, perhaps because of one item, or because it is too long. */
const BODY_REFUSED = new Set([400, 413, 422]);
const EXISTS_ALREADY = 412;
const TOO_MANY = 429;
/** The most items of one request with lines or chunks. */
const MOST_ITEMS = 500;
/** The most lines, and the most chunks, that wait for the API, and the most characters of their JSON. */
const MOST_WAITING = 20_000;
const MOST_CHARACTERS = 8 * 2 ** 20;
/** The API's limits of what a failure and a line may say. */
const CODE = /^[a-z][a-z0-9_.-]{0,99}$/;
const MOST_MESSAGE = 2_000;
const MOST_TEXT = 65_536;
const LEVELS = ["debug", "info", "warning", "error", "critical"];
const MOST_FIELDS = 32;
const MOST_RETRY_AFTER = 7 * 86_400;

/** Somebody has cancelled the run: the task has to stop. */
export class Cancelled extends Error {
  constructor() {
    super("the run is to be cancelled");
    this.name = "Cancelled";
  }
}

/** The lease has ended: another worker may have the task. Nothing that this attempt does counts any more. */
export class LeaseLost extends Error {
  constructor() {
    super("the lease of the task has ended");
    this.name = "LeaseLost";
  }
}

/** The worker stops. It gives the task back, which costs the task no attempt. */
export class Stopped extends Error {
  constructor() {
    super("the worker stops");
    this.name = "Stopped";
  }
}

/** Throw it in a handler: the step has failed for good. */
export class Permanent extends Error {
  /**
   * @param {string} code
   * @param {string} message
   */
  constructor(code, message) {
    super(message);
    this.name = "Permanent";
    this.code = code;
  }
}

/** Throw it in a handler: the attempt failed, and the step is tried again. `after`: seconds until then. */
export class Retryable extends Error {
  /**
   * @param {string} message
   * @param {{ code?: string, after?: number }} [options]
   */
  constructor(message, { code = "handler_error", after } = {}) {
    super(message);
    this.name = "Retryable";
    this.code = code;
    this.after = after;
  }
}

/** A leased task. */
export class Task {
  #ask;
  #fetch;
  #ended = new AbortController();
  /** Aborted when nobody waits for the output any more. */
  #abandoned = new AbortController();
  #lines;
  #chunks;
  #isLost = false;
  #hasLoggedLoss = false;
  /** @type {Map<string, string>} */
  #sent = new Map();

  /**
   * @param {Claim} claim
   * @param {(verb: string, body: object, options?: object) => Promise<any>} ask
   * @param {typeof globalThis.fetch} fetch
   */
  constructor(claim, ask, fetch) {
    this.claim = claim;
    this.#ask = ask;
    this.#fetch = /** @type {typeof fetch} */ ((...request) => fetch(...request)); // a browser's refuses a receiver
    const options = { safe: true, signal: this.#abandoned.signal };
    this.#lines = new Output((first, lines) => this.post("logs", { first, lines }, options));
    this.#chunks = new Output((first, chunks) => this.post("stream", { first, chunks }, options));
  }

  get id() {
    return this.claim.task_id;
  }

  get step() {
    return this.claim.step;
  }

  /** The run's payload. */
  get payload() {
    return this.claim.payload;
  }

  /** `{step: result}` of the steps that this step needs. */
  get results() {
    return this.claim.results;
  }

  /** The files of those steps. */
  get files() {
    return this.claim.files;
  }

  /**
   * Aborted when the task has to stop. Its `reason` is a Cancelled, a LeaseLost or a Stopped. Pass it to `fetch` and to
   * whatever else waits.
   */
  get signal() {
    return this.#ended.signal;
  }

  /** Throws Cancelled, LeaseLost or Stopped once the task has to stop. */
  checkpoint() {
    this.signal.throwIfAborted();
  }

  /**
   * How far the step is, 0 to 100. Rejects with LeaseLost, ApiError, Unavailable.
   * @param {number} percent
   * @param {string} [summary]
   */
  async progress(percent, summary = "") {
    await this.post("progress", { percent, summary });
  }

  /**
   * Add a line to the run's log: sent within a second, and before the task is settled. It is dropped if too many lines wait
   * until the API accepts them; a later line of the log says how many were dropped. Of `fields` the first 32 are kept. Throws
   * RangeError for another level, and TypeError for fields that are not JSON.
   * @param {string} message
   * @param {{ level?: Level, trace?: string, fields?: Record<string, unknown> }} [options]
   */
  log(message, { level = "info", trace = "", fields = {} } = {}) {
    if (!LEVELS.includes(level)) throw new RangeError(`the level of a log line is one of ${LEVELS.join(", ")}, not ${level}`);
    this.#addLine(message, level, { trace, fields: Object.fromEntries(Object.entries(fields).slice(0, MOST_FIELDS)) });
  }

  /**
   * As `log`, at the level `error`, but the line is kept however many wait: it says why the attempt failed.
   * @param {string} message
   * @param {string} trace
   */
  logFailure(message, trace) {
    this.#addLine(message, "error", { trace, beyondBounds: true });
  }

  /**
   * @param {string} message
   * @param {Level} level
   * @param {{ trace?: string, fields?: Record<string, unknown>, beyondBounds?: boolean }} options
   */
  #addLine(message, level, { trace = "", fields = {}, beyondBounds = false }) {
    const line = {
      message: sendable(message.slice(0, MOST_TEXT)),
      level,
      logger: this.step,
      fields,
      traceback: sendable(trace.slice(-MOST_TEXT)),
      at: new Date().toISOString(),
    };
    this.#lines.add(line, toJson(line).length, beyondBounds);
  }

  /**
   * Append a chunk (a text, or another JSON value) to the run's stream, which clients follow. False: the chunk is dropped.
   * Either the attempt has emitted too much, and the stream is cut; or too many chunks wait until the API accepts them, and a
   * later line of the log says how many were dropped. NUL and half characters are taken out of a text, as in a line of the log.
   * Throws TypeError for another value with one of them, and for what is not JSON.
   * @param {unknown} chunk
   * @returns {boolean}
   */
  emit(chunk) {
    const storable = typeof chunk === "string" ? sendable(chunk) : chunk;
    const json = toJson(storable);
    if (escapes(json).includes("\\u0000")) throw new TypeError("a chunk cannot hold a NUL character");
    return this.#chunks.add(storable, json.length);
  }

  /**
   * Read a file that a needed step has stored. `step`: that step, if several have a file of this name. Rejects with
   * RangeError for an unknown file, with Retryable `file_unreadable` if the store refuses or does not answer, and with
   * Retryable `file_corrupt` for bytes with another SHA-256.
   * @param {string} name
   * @param {{ step?: string }} [options]
   * @returns {Promise<Uint8Array>}
   */
  async read(name, { step } = {}) {
    const file = this.files.find((one) => one.name === name && (step === undefined || one.step === step));
    if (file === undefined) throw new RangeError(`no needed step has a file ${name}`);
    const bytes = await this.#withStore(name, "file_unreadable", async () => {
      const answer = await this.#fetch(file.url, { signal: this.signal });
      if (!answer.ok) throw new Retryable(`the store answered ${answer.status} for ${name}`, { code: "file_unreadable" });
      return bodyOf(answer, file.size);
    });
    if (bytes !== undefined && (await sha256(bytes)) === file.sha256) return bytes;
    throw new Retryable(`the bytes of ${name} are not those that were stored`, { code: "file_corrupt" });
  }

  /**
   * Upload a file. Others see it once the task is completed. Rejects with LeaseLost, ApiError, Unavailable, and with
   * Retryable `file_unwritable` if the store refuses or does not answer.
   * @param {string} name
   * @param {Uint8Array | string} data a text is stored as UTF-8
   * @param {string} [contentType]
   */
  async write(name, data, contentType = "application/octet-stream") {
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data;
    const files = [{ name, size: bytes.byteLength, content_type: contentType }];
    const [ticket] = (await this.post("files", { files })).files;
    const body = /** @type {BodyInit} */ (bytes);
    const answer = await this.#withStore(name, "file_unwritable", () =>
      this.#fetch(ticket.url, { method: "PUT", headers: ticket.headers, body, signal: this.signal }),
    );
    await answer.body?.cancel();
    // An earlier try may have stored the file without its answer arriving. The completion verifies the bytes.
    if (!answer.ok && answer.status !== EXISTS_ALREADY) {
      throw new Retryable(`the store answered ${answer.status} for ${name}`, { code: "file_unwritable" });
    }
    this.#sent.set(name, await sha256(bytes));
  }

  /**
   * What `ask` resolves to. An error of the network fails the attempt with the code: it would be a TypeError.
   * @template T
   * @param {string} name
   * @param {string} code
   * @param {() => Promise<T>} ask
   * @returns {Promise<T>}
   */
  async #withStore(name, code, ask) {
    try {
      return await ask();
    } catch (error) {
      this.signal.throwIfAborted();
      if (error instanceof Retryable) throw error;
      throw new Retryable(`the store did not answer for ${name}`, { code });
    }
  }

  /** The files that `write` has uploaded. */
  get sent() {
    return Array.from(this.#sent, ([name, digest]) => ({ name, sha256: digest }));
  }

  /**
   * Send a request about this task, under its lease. Rejects with LeaseLost, ApiError, Unavailable.
   * @param {string} verb
   * @param {object} [body]
   * @param {object} [options] of `Leasehold.request`
   */
  async post(verb, body = {}, options = { safe: true }) {
    if (this.#isLost) throw new LeaseLost();
    try {
      return await this.#ask(verb, body, options);
    } catch (error) {
      if (!(error instanceof ApiError && error.code === "lease_lost")) throw error;
      const lost = new LeaseLost();
      this.#isLost = true;
      this.#ended.abort(lost);
      throw lost;
    }
  }

  /**
   * Send what was logged and emitted. What the API refuses is dropped, and a line of the log says so, and another one what
   * `log` and `emit` have dropped. Rejects with LeaseLost, Unavailable, and with ApiError if the API refuses the key or has
   * failed itself.
   */
  async flush() {
    // The lines last: one may say that a chunk was refused.
    for (const output of [this.#chunks, this.#lines]) while (!(await this.#hasFlushed(output)));
    const lines = this.#lines.takeDropped();
    const chunks = this.#chunks.takeDropped();
    if (lines + chunks === 0) return;
    const message =
      `${lines} lines and ${chunks} chunks of this attempt were dropped before this line: a worker keeps at most ` +
      `${MOST_WAITING} of each, and ${MOST_CHARACTERS} characters, until the API accepts them.`;
    this.#addLine(message, "warning", { beyondBounds: true });
    while (!(await this.#hasFlushed(this.#lines)));
  }

  /**
   * Send the items of `output`. False: the API has refused a request, and others may follow.
   * @param {Output} output
   */
  async #hasFlushed(output) {
    try {
      await output.flush();
    } catch (error) {
      if (!isRefusal(error)) throw error;
      const isLost = output.refuse(BODY_REFUSED.has(error.status));
      // Once: the API may refuse this line, too.
      if (isLost && !this.#hasLoggedLoss) {
        this.#hasLoggedLoss = true;
        const message = `The API has refused output of this attempt: ${error.code}: ${error.message}`;
        this.#addLine(message, "warning", { beyondBounds: true });
      }
      return false;
    }
    return true;
  }

  /**
   * Send what was logged and emitted, and give the task back, within so many milliseconds. A silent
   * request with output does not use up the time. Rejects as `flush`, and with a DOMException when the time is up.
   * @param {number} milliseconds
   */
  async release(milliseconds) {
    const over = new AbortController();
    const timers = [abortAfter(milliseconds * OUTPUT_PART, this.#abandoned), abortAfter(milliseconds, over)];
    try {
      await this.flush().catch(unlessForeign);
      await this.post("release", {}, { safe: true, signal: over.signal });
    } finally {
      for (const timer of timers) clearTimeout(timer);
    }
  }

  /**
   * Tell the handler to stop. The first reason stays.
   * @param {Cancelled | Stopped} reason
   */
  stop(reason) {
    this.#ended.abort(reason);
  }
}

/** Works on the tasks of queues, one at a time. */
export class ExternalWorker {
  #leasehold;
  #queues;
  #leaseSeconds;
  #graceSeconds;
  #waitSeconds;
  #fetch;
  /**
   * The refusals of the last tasks in a row that the API did not let this worker settle.
   * @type {ApiError[]}
   */
  #unsettled = [];

  /**
   * `leaseSeconds`: how long a lease lasts without a heartbeat. A heartbeat is sent three times in that time.
   * `graceSeconds`: how long a handler may still work, and the API take to accept its result, after the worker was told to
   * stop. `waitSeconds`, up to 30: how long one claim waits for a task; a stop waits for it, because a claim that nobody waits
   * for would lease a task to nobody.
   * @param {Leasehold} leasehold
   * @param {{ queues: string[], leaseSeconds?: number, graceSeconds?: number, waitSeconds?: number,
   *   fetch?: typeof globalThis.fetch }} options `fetch`: for the store's signed URLs, which do not get the API key
   */
  constructor(
    leasehold,
    { queues, leaseSeconds = 60, graceSeconds = 30, waitSeconds = 10, fetch = globalThis.fetch },
  ) {
    /** A new id for each start. */
    this.id = crypto.randomUUID().replaceAll("-", "");
    this.#leasehold = leasehold;
    this.#queues = queues;
    this.#leaseSeconds = leaseSeconds;
    this.#graceSeconds = graceSeconds;
    this.#waitSeconds = waitSeconds;
    this.#fetch = fetch;
  }

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
  async serve(handle, { signal } = {}) {
    this.#unsettled = [];
    while (!signal?.aborted) {
      const unsettledBefore = this.#unsettled.length;
      try {
        const claimedAt = performance.now();
        const hadTask = await this.workOnce(handle, { wait: this.#waitSeconds, ...(signal ? { signal } : {}) });
        // A proxy, or an API that stops, may answer each claim at once.
        const atOnce = Math.min(OUTAGE, this.#waitSeconds * 1000);
        if (!hadTask && performance.now() - claimedAt < atOnce) await pause(OUTAGE, signal);
      } catch (error) {
        if (!isOutage(error)) throw error;
        await pause(OUTAGE, signal);
      }
      if (this.#unsettled.length >= MOST_UNSETTLED) throw this.#unsettled.at(-1);
      if (this.#unsettled.length > unsettledBefore) await pause(OUTAGE, signal);
    }
  }

  /**
   * Claim a task, do it and settle it. False: none was due within `wait` seconds, which are 30 at most.
   * @param {Handler} handle
   * @param {{ wait?: number } & Stoppable} [options]
   * @returns {Promise<boolean>}
   */
  async workOnce(handle, { wait = 0, signal } = {}) {
    const body = { worker_id: this.id, queues: this.#queues, wait, lease_seconds: this.#leaseSeconds };
    const { tasks } = await this.#leasehold.request("POST", "/v1/external/claim", { body });
    for (const claim of /** @type {Claim[]} */ (tasks)) await this.#do(handle, claim, signal);
    return tasks.length > 0;
  }

  /**
   * @param {Handler} handle
   * @param {Claim} claim
   * @param {AbortSignal | undefined} signal
   */
  async #do(handle, claim, signal) {
    const path = `/v1/external/tasks/${claim.task_id}`;
    const task = new Task(
      claim,
      (verb, body, options) =>
        this.#leasehold.request("POST", `${path}/${verb}`, {
          ...options,
          body: { worker_id: this.id, epoch: claim.epoch, ...body },
        }),
      this.#fetch,
    );
    const settled = new AbortController();
    const grace = new Grace(task, signal, this.#graceSeconds * 1000);
    const sides = Promise.all([this.#beat(task, settled.signal), this.#sendOutput(task, settled.signal)]);
    sides.catch(() => undefined); // `finally` throws it
    try {
      await this.#run(handle, task, grace);
    } catch (error) {
      if (!(error instanceof LeaseLost)) throw error; // another worker has the task: nobody reads this attempt's result
    } finally {
      grace.end();
      settled.abort();
      await sides;
    }
  }

  /**
   * @param {Handler} handle
   * @param {Task} task
   * @param {Grace} grace
   */
  async #run(handle, task, grace) {
    /** @type {Result | null | void} */
    let result;
    try {
      task.checkpoint();
      result = await grace.orOver(Promise.resolve().then(() => handle(task)));
      toJson(result ?? null);
    } catch (error) {
      await this.#settleError(task, error, grace);
      return;
    }
    await this.#settle(task, "complete", { result: result ?? null, files: task.sent }, grace);
  }

  /**
   * @param {Task} task
   * @param {unknown} error what the handler has thrown
   * @param {Grace} grace
   */
  async #settleError(task, error, grace) {
    const { reason } = task.signal;
    if (reason instanceof LeaseLost || error instanceof LeaseLost) throw error;
    if (reason instanceof Stopped) {
      await this.#giveBack(task);
    } else if (reason instanceof Cancelled) {
      await this.#settle(task, "acknowledge-cancel", {}, grace);
    } else {
      const failure = failureOf(error);
      const trace = error instanceof Error ? textOf(error.stack ?? "") : "";
      task.logFailure(`${failure.code}: ${failure.message}`, trace);
      await this.#settle(task, "fail", failure, grace);
    }
  }

  /**
   * Settle the task. If the API refuses that, the attempt has failed with the refusal. A refused failure stays as it is, except
   * for its message. If the API refuses that, too, the lease ends by itself: another task must not wait for this one. Rejects
   * with LeaseLost, and with ApiError if the API refuses the key.
   * @param {Task} task
   * @param {string} verb
   * @param {object} body
   * @param {Grace} grace
   */
  async #settle(task, verb, body, grace) {
    let refusal = await this.#refusalOf(task, verb, body, grace);
    if (refusal !== undefined) {
      const failure = failureOf(new Retryable(refusal.message, { code: refusal.code }));
      // A Permanent must not become an attempt that is repeated.
      const report = verb === "fail" ? { ...body, message: failure.message } : failure;
      refusal = await this.#refusalOf(task, "fail", report, grace);
    }
    if (refusal === undefined) {
      this.#unsettled = [];
    } else {
      console.warn(`task ${task.id} cannot be settled, and is left to the end of its lease: ${refusal.message}`);
      this.#unsettled.push(refusal);
    }
  }

  /**
   * Settle the task. While the API does not answer, try again: heartbeats keep the lease. The API answers a repetition as
   * it answered the first time. A settled task has all that it has logged and emitted. Once the grace is over, give the task
   * back: the API refuses that of a settled one. Resolves to the API's refusal of this settlement. Rejects as `#settle`.
   * @param {Task} task
   * @param {string} verb
   * @param {object} body
   * @param {Grace} grace
   * @returns {Promise<ApiError | undefined>}
   */
  async #refusalOf(task, verb, body, grace) {
    for (;;) {
      try {
        await grace.orOver(task.flush());
        await task.post(verb, body, { safe: true, signal: grace.over });
        return undefined;
      } catch (error) {
        if (isRefusal(error)) return error;
        if (!isOutage(error) && !(error instanceof Stopped)) throw error;
        if (grace.over.aborted) {
          await this.#giveBack(task);
          return undefined;
        }
        await pause(OUTAGE, grace.over);
      }
    }
  }

  /**
   * Another worker may have the task immediately, and the attempt does not count. If the API does not answer, the lease ends
   * later by itself.
   * @param {Task} task
   */
  async #giveBack(task) {
    await task.release(GIVE_BACK).catch(unlessForeign);
  }

  /**
   * Begin a heartbeat every third of the lease, until the lease is lost. One without an answer within a third is given up:
   * the next one may reach another process of the API.
   * @param {Task} task
   * @param {AbortSignal} settled
   */
  async #beat(task, settled) {
    const between = Math.round((this.#leaseSeconds * 1000) / 3);
    let due = performance.now() + between;
    for (;;) {
      await pause(Math.max(0, due - performance.now()), settled);
      if (settled.aborted) return;
      due = performance.now() + between;
      try {
        const signal = AbortSignal.timeout(between);
        const answer = await task.post("heartbeat", { lease_seconds: this.#leaseSeconds }, { signal });
        if (answer.cancel_requested) task.stop(new Cancelled());
      } catch (error) {
        if (error instanceof LeaseLost) return;
        unlessForeign(error); // try again: the lease may last longer than the outage
      }
    }
  }

  /**
   * Send what the task logs and emits while its handler works.
   * @param {Task} task
   * @param {AbortSignal} settled
   */
  async #sendOutput(task, settled) {
    for (;;) {
      await pause(OUTPUT_PAUSE, settled);
      if (settled.aborted) return;
      try {
        await task.flush();
      } catch (error) {
        if (error instanceof LeaseLost) return;
        unlessForeign(error); // the last flush, before the settlement, meets it too
      }
    }
  }
}

/** The time that a handler has once the worker was told to stop. */
class Grace {
  #signal;
  #stop;
  #end = new AbortController();
  /** @type {Promise<never>} */
  #isOver;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;

  /**
   * @param {Task} task
   * @param {AbortSignal | undefined} signal of the worker
   * @param {number} milliseconds
   */
  constructor(task, signal, milliseconds) {
    this.#signal = signal;
    this.#isOver = new Promise((_, reject) => {
      this.over.addEventListener("abort", () => reject(this.over.reason), { once: true });
    });
    this.#isOver.catch(() => undefined);
    this.#stop = () => {
      task.stop(new Stopped());
      this.#timer = setTimeout(() => this.#end.abort(new Stopped()), milliseconds);
    };
    if (signal?.aborted) this.#stop();
    else signal?.addEventListener("abort", this.#stop, { once: true });
  }

  /** Aborted with a Stopped once the grace is over. */
  get over() {
    return this.#end.signal;
  }

  /**
   * What the work resolves to; rejects with Stopped once the grace is over: the work goes on, and nobody reads what it does.
   * @template T
   * @param {Promise<T>} work
   * @returns {Promise<T>}
   */
  orOver(work) {
    return Promise.race([work, this.#isOver]);
  }

  end() {
    clearTimeout(this.#timer);
    this.#signal?.removeEventListener("abort", this.#stop);
  }
}

/**
 * The items of one attempt that the API has yet to get: the lines of its log, or the chunks of its stream. The API keeps a
 * repeated request once: so after an outage the same items are sent again. Items beyond MOST_WAITING or MOST_CHARACTERS are
 * counted and dropped: else an outage could fill the memory.
 */
class Output {
  #send;
  /** @type {unknown[]} */
  #items = [];
  /**
   * The characters of each item's JSON.
   * @type {number[]}
   */
  #sizes = [];
  #size = 0;
  #dropped = 0;
  #sent = 0;
  /** Items of the request that has got no answer. */
  #sending = 0;
  /** The most items of the next request. */
  #most = MOST_ITEMS;
  #isCut = false;
  /** @type {Promise<void>} */
  #last = Promise.resolve();

  /** @param {(first: number, items: unknown[]) => Promise<{ cut: boolean }>} send `first`: the first item's number */
  constructor(send) {
    this.#send = send;
  }

  /**
   * False: the item is dropped, because the attempt is cut, or because too much waits for the API.
   * @param {unknown} item
   * @param {number} size the characters of its JSON
   * @param {boolean} [beyondBounds] whether the item is kept however much waits
   */
  add(item, size, beyondBounds = false) {
    if (this.#isCut) return false;
    if (!beyondBounds && (this.#items.length >= MOST_WAITING || this.#size + size > MOST_CHARACTERS)) {
      this.#dropped += 1;
      return false;
    }
    this.#items.push(item);
    this.#sizes.push(size);
    this.#size += size;
    return true;
  }

  /** How many items since the last call were dropped because too much waited for the API. */
  takeDropped() {
    const dropped = this.#dropped;
    this.#dropped = 0;
    return dropped;
  }

  /** Send all items. Rejects as the request does: then the next `flush` begins with the same request. */
  flush() {
    const flushed = this.#last.then(() => this.#sendAll());
    this.#last = flushed.catch(() => undefined);
    return flushed;
  }

  async #sendAll() {
    while (this.#items.length > 0) {
      this.#sending ||= Math.min(this.#items.length, this.#most);
      const { cut } = await this.#send(this.#sent + 1, this.#items.slice(0, this.#sending));
      this.#forget();
      this.#most = Math.min(2 * this.#most, MOST_ITEMS);
      this.#isCut = cut;
      if (cut) this.#remove(this.#items.length);
    }
  }

  /**
   * The API has refused the request. The next one has half of its items, so that one bad item costs no other. True: they are
   * dropped instead, because there was one alone, or because `divide` is false.
   * @param {boolean} divide
   */
  refuse(divide) {
    if (divide && this.#sending > 1) {
      this.#most = Math.floor(this.#sending / 2);
      this.#sending = 0;
      return false;
    }
    this.#forget();
    return true;
  }

  /** Forget the request that the API has answered or refused. */
  #forget() {
    this.#sent += this.#sending;
    this.#remove(this.#sending);
    this.#sending = 0;
  }

  /** @param {number} count of the first items */
  #remove(count) {
    this.#items.splice(0, count);
    for (const size of this.#sizes.splice(0, count)) this.#size -= size;
  }
}

/**
 * Whether a later try may help.
 * @param {unknown} error
 */
function isOutage(error) {
  return error instanceof Unavailable || (error instanceof ApiError && (error.status >= 500 || error.status === TOO_MANY));
}

/**
 * Whether the API refuses the request, and not the key: another request may be accepted.
 * @param {unknown} error
 * @returns {error is ApiError}
 */
function isRefusal(error) {
  return error instanceof ApiError && !isOutage(error) && !KEY_REFUSED.has(error.status);
}

/**
 * Throws what is neither an answer of the API nor the lack of one: an error in this program.
 * @param {unknown} error
 */
function unlessForeign(error) {
  const known = error instanceof ApiError || error instanceof Unavailable || error instanceof LeaseLost;
  if (!known && !(error instanceof DOMException)) throw error;
}

/**
 * Abort what waits for an answer of the API once so many milliseconds have passed. Returns the timer.
 * @param {number} milliseconds
 * @param {AbortController} waiting
 */
function abortAfter(milliseconds, waiting) {
  return setTimeout(
    () => waiting.abort(new DOMException("the API has not answered in time", "TimeoutError")),
    milliseconds,
  );
}

/**
 * The failure of an attempt in which the handler threw `error`, as the API accepts it.
 * @param {unknown} error
 */
function failureOf(error) {
  const own = error instanceof Permanent || error instanceof Retryable;
  const message = textOf(own ? error.message : error);
  const after = error instanceof Retryable ? error.after : undefined;
  return {
    code: own && typeof error.code === "string" && CODE.test(error.code) ? error.code : "handler_error",
    message: sendable(message.slice(0, MOST_MESSAGE)),
    retryable: !(error instanceof Permanent),
    retry_after: after === undefined ? null : Math.min(Math.max(after, 0), MOST_RETRY_AFTER),
  };
}

/**
 * What was thrown, as text. A value without a text, such as Object.create(null), must not end the worker.
 * @param {unknown} error
 */
function textOf(error) {
  try {
    return String(error);
  } catch {
    return "the text of what the handler has thrown cannot be read";
  }
}

/**
 * The JSON of the value. Throws TypeError for what is not JSON, and for half characters, which the API does not read.
 * @param {unknown} value
 */
function toJson(value) {
  const text = JSON.stringify(value, (_, part) => {
    if (typeof part === "number" && !Number.isFinite(part)) throw new TypeError(`${part} is not JSON`);
    return part;
  });
  if (text === undefined) throw new TypeError(`a ${typeof value} is not JSON`);
  if (escapes(text).includes("\\ud")) throw new TypeError("a text with half a character is not JSON");
  return text;
}

/**
 * The JSON without escaped backslashes, so that a `\u` in it begins an escape. JSON.stringify escapes half characters, as
 * `\ud800`, and no whole ones.
 * @param {string} json
 */
function escapes(json) {
  return json.replaceAll("\\\\", "");
}

/**
 * The text without half characters and without NUL, which the API cannot store. Cut the text before: a cut can halve one.
 * @param {string} text
 */
function sendable(text) {
  return text.replace(/\p{Surrogate}/gu, "\uFFFD").replaceAll("\0", "");
}

/**
 * The body of the answer; undefined if it is longer than `size`, so that it cannot fill the memory.
 * @param {Response} answer
 * @param {number} size
 */
async function bodyOf(answer, size) {
  const bytes = new Uint8Array(size);
  const reader = answer.body?.getReader();
  let length = 0;
  while (reader !== undefined) {
    const { done, value } = await reader.read();
    if (done) break;
    if (length + value.byteLength > size) {
      await reader.cancel();
      return undefined;
    }
    bytes.set(value, length);
    length += value.byteLength;
  }
  return bytes.subarray(0, length);
}

/** @param {Uint8Array} bytes */
async function sha256(bytes) {
  const digest = await crypto.subtle.digest("SHA-256", /** @type {BufferSource} */ (bytes));
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Waits, at most until `signal` is aborted.
 * @param {number} milliseconds
 * @param {AbortSignal | undefined} signal
 * @returns {Promise<void>}
 */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve();
    const timer = setTimeout(done, milliseconds);
    signal?.addEventListener("abort", done, { once: true });
    function done() {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    }
  });
}
