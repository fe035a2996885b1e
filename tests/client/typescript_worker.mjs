// What tests/client/test_typescript_worker.py lets the TypeScript worker do. A handler does what the run's payload says.
import { Leasehold } from "../../clients/typescript/src/index.js";
import { ExternalWorker, Permanent, Retryable } from "../../clients/typescript/src/worker.js";

const [queue, graceSeconds] = process.argv.slice(2);
const leasehold = new Leasehold({ url: process.env.LEASEHOLD_URL, key: process.env.LEASEHOLD_API_KEY, timeout: 1 });
const worker = new ExternalWorker(leasehold, {
  queues: [queue],
  leaseSeconds: 5,
  graceSeconds: Number(graceSeconds),
  waitSeconds: 1,
});
const say = (name, value) => console.log(JSON.stringify([name, value]));
const stopped = (signal) => new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
let calls = 0;

const doing = {
  async files(task) {
    if (task.step === "use") {
      const bytes = await task.read("report.csv", { step: "make" });
      const unknown = await task.read("another").catch((error) => error.name);
      return { read: new TextDecoder().decode(bytes), results: task.results, unknown };
    }
    await task.write("report.csv", "a,b\n1,ü\n", "text/csv");
    await task.progress(40, "nearly");
    task.log("made\0 \ud800", { fields: { rows: 1 } });
    task.emit("tok");
    task.emit({ en: 1 });
    return { made: 1 };
  },
  async output(task) {
    for (let number = 0; number < 25; number += 1) {
      task.log(`${number} ${"x".repeat(65_000)}`, { fields: number === 7 ? { huge: 2 ** 69 } : {} });
      task.emit(number === 17 ? { huge: 2 ** 69 } : number);
    }
    task.log("many", { fields: Object.fromEntries(Array.from({ length: 40 }, (_, number) => [`f${number}`, number])) });
    task.emit("a\0b\ud800");
    task.emit({ plain: "\\u0000 \\ud800 \u{1f600}" });
    const refused = [];
    for (const act of [
      () => task.log("odd", { level: "warn" }),
      () => task.log("odd", { fields: { half: "\ud800" } }),
      () => task.emit({ nul: ["\0"] }),
      () => task.emit({ "\0": 1 }),
      () => task.emit(["\\\0"]),
      () => task.emit(["\udc00"]),
    ]) {
      try {
        act();
        refused.push("nothing");
      } catch (error) {
        refused.push(error.name);
      }
    }
    return { refused };
  },
  async permanent() {
    throw new Permanent("broken", "it is broken");
  },
  async odd() {
    throw new Permanent("Not A Code", "x".repeat(5000));
  },
  async unprintable() {
    throw Object.create(null);
  },
  async untold() {
    throw Object.assign(new Retryable("", { after: 0 }), { code: undefined, message: 7, stack: ["no", "text"] });
  },
  async halves(task) {
    task.log(`${"x".repeat(65_535)}\u{1f600}`, { trace: `\u{1f600}${"x".repeat(65_535)}` });
    throw new Permanent("cut", `${"x".repeat(1999)}\u{1f600}`);
  },
  async refused() {
    return ["a", "list"];
  },
  async infinite() {
    return { value: Infinity };
  },
  async later(task) {
    if (task.claim.attempt === 1) throw new Retryable("later", { code: "later", after: 0 });
    return { attempt: task.claim.attempt };
  },
  async outage() {
    calls += 1;
    say("outage", calls);
    await new Promise((resolve) => process.once("SIGUSR2", resolve));
    return { calls };
  },
  async waits(task) {
    say("waits", task.claim.attempt);
    await stopped(task.signal).catch((reason) => {
      say("stopped by", reason.name);
      throw reason;
    });
  },
  async deaf(task) {
    say("deaf", task.claim.attempt);
    await new Promise((resolve) => setTimeout(resolve, 3_600_000));
  },
};

const stop = new AbortController();
process.once("SIGTERM", () => stop.abort());
say("ready", true);
await worker.serve((task) => doing[task.payload.do](task), { signal: stop.signal });
say("ended", true);
process.exit(0); // a deaf handler would keep the process
