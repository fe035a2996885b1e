// What tests/client/test_typescript.py lets the TypeScript client do. One line of JSON for each result.
import { ApiError, JobFailed, Leasehold, Unavailable } from "../../clients/typescript/src/index.js";

const [job, failed] = process.argv.slice(2);
const leasehold = new Leasehold({ url: process.env.LEASEHOLD_URL, key: process.env.LEASEHOLD_API_KEY, timeout: 60 });
const say = (name, value) => console.log(JSON.stringify([name, value]));

async function all(items) {
  const list = [];
  for await (const item of items) list.push(item);
  return list;
}

const made = await leasehold.submit({ template: "outside", payload: { n: 1 }, tags: { customer: "7" } });
say("made", made.template);
const batch = await leasehold.submitMany({ template: "outside", runs: Array.from({ length: 120 }, () => ({})) });
const listed = new Set((await all(leasehold.jobs("template:outside"))).map((item) => item.id));
say("listed", batch.ids.filter((id) => listed.has(id)).length);
say("by tag", (await all(leasehold.jobs("tag.customer:7"))).map((item) => item.id === made.id));
say("explained", (await leasehold.explain(made.id)).reasons.length > 0);
say("cancelled", (await leasehold.cancel(made.id, "enough")).status);
say("deleted", await leasehold.delete(made.id));
say("gone", await leasehold.get(made.id).catch((error) => error instanceof ApiError && [error.status, error.code]));
say("events", (await all(leasehold.events(job))).map((event) => event.seq));
say("logs", (await all(leasehold.logs(job, { after: 1 }))).map((line) => line.message));
say("stream", (await all(leasehold.stream(job))).map((item) => [item.event, item.chunk ?? null]));
say("result", await leasehold.result(job));
say("failed", await leasehold.result(failed).catch((error) => error instanceof JobFailed && error.job.error.code));
try {
  new Leasehold({ url: process.env.NOT_SET, key: "lh_x" });
} catch (error) {
  say("without url", error.message);
}
const away = new Leasehold({ url: "http://127.0.0.1:1", key: "lh_x", timeout: 0.5 });
say("away", await away.submit({ template: "t" }).catch((error) => error instanceof Unavailable && typeof error.key));
