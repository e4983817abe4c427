// Loaded into a baton process by a benchmark or test, which talks to it over Node's channel between processes: tells what the
// process has allocated and what processor time it has taken since it began.
import { getHeapStatistics } from 'node:v8';

process.on('message', () => {
  const { user, system } = process.cpuUsage();
  process.send({ bytes: getHeapStatistics().total_allocated_bytes, cpuUs: user + system });
});
// The channel must not keep the process alive.
process.channel?.unref();
