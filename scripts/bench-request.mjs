// What a request costs the process that serves it: bytes allocated on V8's heap and processor time, for each kind of
// test/support/request-cost.ts. Arguments: requests of each (default 2000, as many before them that do not count), kinds
// (default all).
import { KINDS, measureRequests } from '../test/support/request-cost.ts';
import { machine } from './store-process.mjs';

const requests = Number(process.argv[2] ?? 2000);
const chosen = process.argv.slice(3);
console.log(`${machine}\n\n| kind | KiB allocated | processor time |\n|---|---:|---:|`);
for (const kind of chosen.length > 0 ? chosen : Object.keys(KINDS)) {
  const { bytes, cpuUs } = await measureRequests({ kind, warmUp: requests, requests });
  console.log(`| ${kind} | ${(bytes / 1024).toFixed(1)} | ${cpuUs} µs |`);
}
