// The hostile clients of bench-hostile.mjs, a process of their own: what they cost themselves is not measured with what they
// cost others. Arguments: kind, port, count. Tells its parent that they are there, then how many are connected when asked.
import { dribblers, headFloods, idlers, nonReaders } from '../test/support/hostile.ts';

const KINDS = { idlers, dribblers, nonReaders, headFloods };
const [kind, port, count] = process.argv.slice(2);
const crowd = await KINDS[kind](Number(port), Number(count));
process.on('message', () => process.send(crowd.open()));
process.on('disconnect', () => process.exit());
process.send(crowd.open());
