import { execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { cpSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { promisify } from 'node:util';
import { afterAll, expect, test } from 'vitest';
import { connectRemote } from '../../src/rpc/clients.ts';
import { startSimPools } from '../../src/sim/pools.ts';
import { startSim } from '../../src/sim/start-sim.ts';
import { startBatonProcess } from '../support/baton-process.ts';
import { contentOf, post } from '../support/harness.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

const run = promisify(execFile);
const scratch = mkdtempSync(join(tmpdir(), 'baton-python-router-'));
const example = join(scratch, 'examples', 'python-router');
const python = join(scratch, 'venv', 'bin', 'python');
let ready: Promise<void> | undefined;
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

/** The steps of the example's README, in a copy of it. */
async function setUp(): Promise<void> {
  for (const part of ['examples/python-router', 'proto/baton', 'test/fixtures/chain.json']) {
    cpSync(part, join(scratch, part), { recursive: true });
  }
  await run('python3', ['-m', 'venv', join(scratch, 'venv')]);
  await run(python, ['-m', 'pip', 'install', '--quiet', '-r', join(example, 'requirements.txt')], { timeout: 200_000 });
  await run(join(example, 'generate.sh'), [python]);
}

test.beforeEach(async (context) => {
  if (!(await hasTool('python3', ['-c', 'import venv, ensurepip']))) skipWithout(context, 'python3 with venv');
  ready ??= setUp();
  await ready;
});

const script = (code: string, ...args: string[]) => run(python, ['-c', code, ...args], { cwd: example });

test('the chain is the one of the test vectors', async () => {
  const { stdout } = await script(`
import json
from chain import chain
checked = 0
for vector in json.load(open("../../test/fixtures/chain.json"))["vectors"]:
    digests, tail = chain(vector["token_ids"], vector["model"], vector["adapter"], vector["cache_salt"])
    assert [d.hex() for d in digests] == vector["chain"]["digests"], vector["name"]
    assert tail == vector["chain"]["tail_token_ids"], vector["name"]
    checked += 1
print(checked)
`);
  expect(Number(stdout)).toBeGreaterThan(5);
});

test('against a real store: handles come back as they were, once, and only for their prompt', async () => {
  await using store = await startBatonProcess(['--roles', 'kvstore', '--admin-port', 'off']);
  const { stdout } = await script(
    `
import sys
sys.path.insert(0, "gen")
import grpc, uuid
from store import Store, Claim, pb, rpc
import store as module
module.BUDGET_S = 10
store = Store(sys.argv[1])
handle = {"do_remote_prefill": False, "do_remote_decode": True, "remote_block_ids": [[1, 2, 3, 4, 5]], "remote_engine_id": "e_dp0",
          "remote_request_id": "r", "remote_host": "10.0.0.2", "remote_port": 5601, "tp_size": None, "remote_num_tokens": 70,
          "remote_blocks_expiry_time": 1519.25, "new_in_2027": {"a": [1, "x"]}}
ids = list(range(71))
store.put("m", "c", "d1", handle, ids, 16)
print(store.take("m", "c", [9] + ids))
store.put("m", "c", "d1", handle, ids, 16)
with store.take("m", "c", ids) as claim:
    assert claim.handle == handle and list(claim.handle) == list(handle), claim.handle
    print(claim.matched, store.take("m", "c", ids))
    claim.release()
with store.take("m", "c", ids + [1]) as claim:
    pass
print(store.take("m", "c", ids))
store.put("m", "c", "d1", handle, ids, 16)
with store.take("m", "c", ids[:65] + [3, 3, 3]) as claim:
    print(claim.matched, claim.handle["remote_num_tokens"], claim.handle["remote_block_ids"])
try:
    rpc.KVCacheStoreStub(grpc.insecure_channel(sys.argv[1])).TakeEntry(
        pb.TakeEntryRequest(idempotency_key="k", key=pb.EntryKey(model="m", conversation_id="c")))
except grpc.RpcError as error:
    print(error.code().name, b"PROMPT_REQUIRED" in dict(error.trailing_metadata())["grpc-status-details-bin"])
`,
    store.rpc,
  );
  expect(stdout.trim().split('\n')).toEqual([
    'PREFIX_MISMATCH',
    '70 TAKEN',
    'TAKEN',
    '65 65 [[1, 2, 3, 4, 5]]',
    'FAILED_PRECONDITION True',
  ]);
});

test('the router serves conversations as one engine would, and reads what the turn before left', async () => {
  await using stack = new AsyncDisposableStack();
  const engine = { bidirectional: true, eosEvery: 0, seed: 3 } as const;
  const pools = stack.use(await startSimPools({ prefill: 1, decode: 1, engine }));
  const plain = await startSim({ ...engine, role: 'both', connector: 'none' });
  stack.defer(() => plain.close());
  const store = stack.use(await startBatonProcess(['--roles', 'kvstore', '--admin-port', 'off']));
  const [prefill, decode] = [pools.prefill[0]?.url ?? '', pools.decode[0]?.url ?? ''];
  // On a busy machine the store may need longer than a request should wait for it.
  const patient =
    'import sys; sys.path.insert(0, "gen"); import runpy, store; store.BUDGET_S = 10; runpy.run_path("router.py", run_name="__main__")';
  const args = ['-c', patient, '--prefill', prefill, '--decode', decode, '--store', store.rpc, '--port', '0'];
  const router = spawn(python, args, { cwd: example, stdio: ['ignore', 'pipe', 'inherit'] });
  stack.defer(async () => {
    const ended = once(router, 'exit');
    router.kill();
    await ended;
  });
  const [line] = await once(createInterface({ input: router.stdout }), 'line');
  const url = `http://127.0.0.1:${/\d+/.exec(String(line))?.[0]}`;

  const turn = async (messages: object[], stream: boolean, session = `s-${stream}`) => {
    const body = { model: 'sim-model', messages, max_tokens: 30, ignore_eos: true, stream };
    const reply = await post(`${url}/v1/chat/completions`, body, { headers: { 'x-session-id': session } });
    expect(reply.status, reply.text).toBe(200);
    const [text = ''] = contentOf(reply.text).texts;
    const right = await post(`${plain.url}/v1/chat/completions`, body);
    expect(text).toBe(contentOf(right.text).texts[0]);
    return { text, reuse: reply.headers.get('x-reuse') ?? '' };
  };
  const remote = stack.use(connectRemote({ url: `http://${store.rpc}` }));
  const puts = async () => Number((await remote.kvCacheStore.getStats({})).puts);
  for (const stream of [false, true]) {
    const messages: object[] = [{ role: 'user', content: 'Tell me of relay races. '.repeat(12) }];
    for (let index = 0; index < 5; index++) {
      const before = await puts();
      const { text, reuse } = await turn(messages, stream);
      expect(reuse, `turn ${index + 1}`).toMatch(index === 0 ? /^NEVER_STORED$/ : /^HIT \d{3}/);
      await expect.poll(puts, { timeout: 10_000 }).toBe(before + 1);
      messages.push({ role: 'assistant', content: text }, { role: 'user', content: `And ${index}?` });
    }
    messages[0] = { role: 'user', content: 'Tell me of something else. '.repeat(12) };
    expect((await turn(messages, stream)).reuse).toBe('PREFIX_MISMATCH');
  }
  // A store that is away costs no answer.
  await store.end('SIGKILL');
  expect((await turn([{ role: 'user', content: 'Still there?' }], false)).reuse).toMatch(
    /^STORE_(UNAVAILABLE|DEADLINE_EXCEEDED)$/,
  );
  for (const sim of [...pools.prefill, ...pools.decode]) {
    expect(sim.state()).toMatchObject({ mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, hung: 0 });
  }
});
