// Drives sharp (libvips for Node.js). Arguments: PICTURE DIRECTORY SECONDS. It prints pictures a second.
import path from "node:path";
import { createRequire } from "node:module";

const sharp = createRequire(path.join(process.env.PEER_HOME, "package.json"))("sharp");
const [picture, directory, seconds] = [process.argv[2], process.argv[3], Number(process.argv[4])];
sharp.concurrency(1); // the bench starts a process for each core
sharp.cache(false);

async function make() {
  const { data, info } = await sharp(picture)
    .resize(2048, 2048, { fit: "inside", withoutEnlargement: true })
    .raw()
    .toBuffer({ resolveWithObject: true });
  const small = () => sharp(data, { raw: { width: info.width, height: info.height, channels: info.channels } });
  await small().jpeg({ quality: 90, chromaSubsampling: "4:4:4", optimizeCoding: false })
    .toFile(path.join(directory, "resize.jpg"));
  await small().jpeg({ quality: 80, chromaSubsampling: "4:2:0", progressive: true })
    .toFile(path.join(directory, "compress.jpg"));
  await small().webp({ quality: 80, effort: 4 }).toFile(path.join(directory, "final.webp"));
}

await make();
const began = performance.now();
let made = 0;
while (performance.now() - began < 1000 * seconds) {
  await make();
  made += 1;
}
console.log((1000 * made) / (performance.now() - began));
