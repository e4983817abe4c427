import { mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, expect, test } from 'vitest';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { type BatonProcess, startBatonProcess } from '../support/baton-process.ts';
import { contentOf, post } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

async function engine(role: 'prefill' | 'decode'): Promise<Sim> {
  const sim = await startSim({ role, fixedMs: 1, decodeMsPerToken: 2, recordRequests: true });
  stack.defer(() => sim.close());
  return sim;
}

const listOf = (...sims: readonly Sim[]) =>
  `instances:\n${sims.map(({ url, role }) => `  - {url: "${url}", role: ${role}}\n`).join('')}`;

/** Streams that come one after the other until they are told to stop; the answer is what failed of them, and how many there were. */
function load(url: string, width: number) {
  const stop = new AbortController();
  const failed: string[] = [];
  let finished = 0;
  const one = async (worker: number) => {
    for (let turn = 0; !stop.signal.aborted; turn += 1) {
      const messages = [{ role: 'user', content: `worker ${worker} asks ${turn}` }];
      const reply = await post(`${url}/v1/chat/completions`, { messages, stream: true, max_tokens: 20 });
      const { finish, errors, done } = contentOf(reply.text);
      if (reply.status !== 200 || errors.length > 0 || !done || finish[0] === null) failed.push(reply.text);
      finished += 1;
    }
  };
  const all = Promise.all(Array.from({ length: width }, (_, worker) => one(worker)));
  return {
    finished: () => finished,
    stop: async () => {
      stop.abort();
      await all;
      return failed;
    },
  };
}

const linesWith = (baton: BatonProcess, text: string) => baton.lines.filter((line) => line.includes(text));
const reload = async (baton: BatonProcess) => {
  const reply = await fetch(`${baton.adminUrl}/-/reload`, { method: 'POST' });
  return { status: reply.status, body: await reply.json() };
};
const metric = async (baton: BatonProcess, name: string) => {
  const text = await (await fetch(`${baton.adminUrl}/metrics`)).text();
  return text.split('\n').find((line) => line.startsWith(name));
};

test('a rewritten file is in force at once, and no stream notices', { timeout: 30_000 }, async () => {
  const [p, d1, d2] = await Promise.all([engine('prefill'), engine('decode'), engine('decode')]);
  const folder = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const file = join(folder, 'baton.yaml');
  const write = (text: string) => {
    writeFileSync(`${file}.next`, text);
    renameSync(`${file}.next`, file);
  };
  write(listOf(p, d1));
  const baton = stack.use(await startBatonProcess(['--config', file, '--queue-timeout', '1000s']));
  await waitUntil(async () => (await fetch(`${baton.url}/readiness`)).status === 200);
  const streams = load(baton.url, 8);
  await waitUntil(() => streams.finished() > 8);

  write(
    `${listOf(p, d2)}policy: least_loaded\nlimits: {decode: 50}\ntimeouts: {queue: 7s}\nrpc: {port: 1}\nfacade: {hold: 1MiB, body_limit: 1MiB}\n`,
  );
  await waitUntil(() => linesWith(baton, 'are in force').length === 1);
  expect(JSON.parse(linesWith(baton, 'are in force')[0] ?? '')).toMatchObject({
    cause: 'file',
    keys: ['facade.hold', 'policy.prefill', 'policy.decode', 'instances', 'limits.decode'],
  });
  // A flag goes before the file, and what needs a restart is named.
  expect(linesWith(baton, 'needs a restart')[0]).toContain('needs a restart: facade.body_limit');
  await waitUntil(() => linesWith(baton, '"removed_from_source"').length > 0);
  await waitUntil(() =>
    linesWith(baton, `"instance":"${new URL(d2.url).host}"`).some((line) => line.includes('"to":"ready"')),
  );
  const before = d1.requests.length;
  const seen = streams.finished();
  await waitUntil(() => streams.finished() > seen + 20);
  expect(d1.requests.length - before).toBeLessThanOrEqual(8);
  expect(d2.requests.length).toBeGreaterThan(0);

  write(`${listOf(p, d1)}queue: {max: 9}\nhealth:\n  intervall: 3s\npolicy: fastest\n`);
  await waitUntil(() => linesWith(baton, 'those in force stay').length === 2);
  expect(linesWith(baton, 'those in force stay').map((line) => JSON.parse(line).problem)).toEqual([
    expect.stringMatching(/baton\.yaml:6:3: health\.intervall: unknown key; did you mean health\.interval\?$/),
    expect.stringMatching(/baton\.yaml:7:1: policy: expected one of .* got "fastest"$/),
  ]);
  expect(await metric(baton, 'baton_config_last_reload_successful ')).toBe('baton_config_last_reload_successful 0');
  expect(await metric(baton, 'baton_config_reloads_total{result="refused"}')).toMatch(/ 1$/);
  expect(await reload(baton)).toMatchObject({ status: 500, body: { problems: { length: 2 } } });
  const stable = d1.requests.length;
  const now = streams.finished();
  await waitUntil(() => streams.finished() > now + 10);
  expect(d1.requests.length).toBe(stable);

  write(`${listOf(p, d1, d2)}policy: least_loaded\nrpc: {port: 1}\nlog: {level: warn}\n`);
  baton.signal('SIGHUP');
  await waitUntil(async () => (await metric(baton, 'baton_config_last_reload_successful '))?.endsWith(' 1') === true);
  expect(await reload(baton)).toEqual({ status: 200, body: { applied: [], needs_restart: [], left_out: [] } });
  const resumed = d1.requests.length;
  await waitUntil(() => d1.requests.length > resumed + 5);
  const quiet = linesWith(baton, '"level":"info"').length;
  expect(await streams.stop()).toEqual([]);
  expect(linesWith(baton, '"level":"info"').length).toBe(quiet);
});
