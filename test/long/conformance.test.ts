import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { startRpcListener } from '../../src/rpc/listener.ts';
import { EVERYTHING, KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import { STORES } from '../../src/stores/index.ts';
import { startBatonProcess } from '../support/baton-process.ts';
import { limits } from '../support/kv-store.ts';
import { needsRedis, RedisServer } from '../support/redis.ts';

// `npm run conformance` as somebody runs it against his own store.
const folder = mkdtempSync(join(tmpdir(), 'baton-conformance-'));
afterAll(() => rmSync(folder, { recursive: true }));

/** Every caller that the suite has a use for, by the variable of its token. */
const CALLERS: Readonly<Record<string, string>> = {
  CONFORMANCE_TOKEN: 'team',
  CONFORMANCE_OTHER_TOKEN: 'other',
  CONFORMANCE_OPERATOR_TOKEN: 'team operator',
  CONFORMANCE_ROUTER_TOKEN: 'router any-tenant',
  CONFORMANCE_UNVERIFIED_TOKEN: 'team unverified',
};
const TOKENS = Object.fromEntries(Object.keys(CALLERS).map((variable) => [variable, `${variable.toLowerCase()}-1`]));

/** File with the tokens of all callers. */
function tokensFile(): string {
  const path = join(folder, 'tokens.txt');
  const lines = Object.entries(CALLERS).map(([variable, caller]) => {
    const [tenant = '', ...rights] = caller.split(' ');
    const hash = createHash('sha256')
      .update(TOKENS[variable] ?? '')
      .digest('hex');
    return [tenant, `sha256:${hash}`, ...rights].join(' ');
  });
  writeFileSync(path, `${lines.join('\n')}\n`);
  return path;
}

let runs = 0;

interface TestResult {
  readonly status: string;
  readonly title: string;
  readonly failureMessages: readonly string[];
}

interface Outcome {
  readonly passed: number;
  readonly failed: readonly string[];
  readonly skipped: number;
  /** What the failed ones said. */
  readonly why: string;
}

/** Runs the suite, or the tests of one name; resolves with what it found. */
async function conformance(env: Readonly<Record<string, string>>, only?: string): Promise<Outcome> {
  const results = join(folder, `results-${++runs}.json`);
  // Nothing of the run that this is a part of.
  const own = Object.entries(process.env).filter(([name]) => !name.startsWith('VITEST'));
  const child = spawn('npm', ['run', '--silent', 'conformance', '--', ...(only === undefined ? [] : ['-t', only])], {
    env: { ...Object.fromEntries(own), ...env, BATON_TEST_RESULTS: results },
    stdio: 'ignore',
  });
  await once(child, 'exit');
  const { numPassedTests, numPendingTests, testResults } = JSON.parse(readFileSync(results, 'utf8'));
  const tests: readonly TestResult[] = testResults.flatMap(
    ({ assertionResults }: { readonly assertionResults: readonly unknown[] }) => assertionResults,
  );
  const failed = tests.filter(({ status }) => status === 'failed');
  return {
    passed: numPassedTests,
    failed: [...new Set(failed.map(({ title }) => title))].toSorted(),
    skipped: numPendingTests,
    why: failed.flatMap(({ failureMessages }) => failureMessages).join('\n'),
  };
}

test('a real store passes it, with memory and with valkey, and every caller is tried', async (context) => {
  needsRedis(context);
  await using redis = await RedisServer.start();
  const args = ['--roles', 'kvstore', '--admin-port', 'off', '--rpc-tokens-file', tokensFile()];
  await using memory = await startBatonProcess(args);
  await using valkey = await startBatonProcess([...args, '--store', 'valkey', '--valkey-url', redis.url]);
  const [first, second] = await Promise.all([
    conformance({ ...TOKENS, CONFORMANCE_URL: `http://${memory.rpc}`, CONFORMANCE_PROTOCOLS: 'grpc' }),
    conformance({ ...TOKENS, CONFORMANCE_URL: `http://${valkey.rpc}`, CONFORMANCE_PROTOCOLS: 'grpc-web' }),
  ]);
  expect(first, first.why).toMatchObject({ failed: [], skipped: 0 });
  expect(first.passed).toBeGreaterThan(25);
  expect(second, second.why).toEqual(first);
});

test('a store without tokens passes what needs none; one that gives a handle twice does not', async () => {
  await using plain = await startBatonProcess(['--roles', 'kvstore', '--admin-port', 'off']);
  await using careless = await startCarelessStore();
  const twice = 'gives each entry to one of many takers';
  const [good, bad] = await Promise.all([
    conformance({ CONFORMANCE_URL: `http://${plain.rpc}`, CONFORMANCE_PROTOCOLS: 'grpc' }),
    conformance({ CONFORMANCE_URL: careless.url, CONFORMANCE_PROTOCOLS: 'grpc' }, twice),
  ]);
  expect(good, good.why).toMatchObject({ failed: [], skipped: 4 });
  expect(bad.failed).toEqual([twice]);
});

/** Gives what it once gave to whoever asks for the same conversation. */
async function startCarelessStore(): Promise<AsyncDisposable & { readonly url: string }> {
  await using opening = new AsyncDisposableStack();
  const store = opening.use(await STORES.memory({ now: () => performance.now(), limits: limits() }));
  const service = opening.use(new KvCacheStoreService({ store, callerOf: () => EVERYTHING }));
  const honest = service.takeEntry.bind(service);
  const kept = new Map<string, ReturnType<typeof honest>>();
  service.takeEntry = (request, context) => {
    const id = request.key?.conversationId ?? '';
    const answer = kept.get(id) ?? honest(request, context);
    kept.set(id, answer);
    return answer;
  };
  const listener = await startRpcListener({
    host: '127.0.0.1',
    port: 0,
    services: { kvCacheStore: service },
    callerOf: () => EVERYTHING,
    onFault: () => {},
  });
  opening.defer(() => listener.close(0));
  const stack = opening.move();
  return { url: `http://127.0.0.1:${listener.port}`, [Symbol.asyncDispose]: () => stack.disposeAsync() };
}
