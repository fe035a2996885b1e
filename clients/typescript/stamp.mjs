// Writes into the generated types which document they were made of: a test compares it with the document that is there.
import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";

const sha256 = createHash("sha256").update(readFileSync("openapi.json")).digest("hex");
const types = readFileSync("src/schema.d.ts", "utf8").replace(/^\/\/ openapi\.json: .*\n/, "");
writeFileSync("src/schema.d.ts", `// openapi.json: ${sha256}\n${types}`);
