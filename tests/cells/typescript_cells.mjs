// What tests/cells/test_typescript.py lets the TypeScript client do between two cells. It prints one object.
import { ApiError, Leasehold } from "../../clients/typescript/src/index.js";

const [mode] = process.argv.slice(2);
const asked = [];
const http = process.env.LEASEHOLD_URL;
const url = mode === "https" ? http.replace("http:", "https:") : http;

/** The servers have no certificate: the client's https requests are sent by http. */
function fetch(address, options) {
  asked.push(address.origin);
  return globalThis.fetch(new URL(String(address).replace("https:", "http:")), options);
}

const leasehold = new Leasehold({ url, key: process.env.LEASEHOLD_API_KEY, fetch });
if (mode === "follows") {
  const run = await leasehold.submit({ template: "noop" });
  await leasehold.get(run.id);
  console.log(JSON.stringify({ run: run.id, asked }));
} else {
  // A request without a body: Node may lose one with a body when the answer comes before the body was sent.
  const refused = await leasehold
    .get(crypto.randomUUID())
    .catch((error) => error instanceof ApiError && [error.status, error.code]);
  console.log(JSON.stringify({ refused, asked }));
}
