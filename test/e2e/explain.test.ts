import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { runCli } from '../../src/cli/run.ts';
import { cliHost } from '../support/cli-host.ts';
import { freePort } from '../support/free-port.ts';
import { STUB_MODEL, type Stubbed, startStubbed } from '../support/stub-engine.ts';

const directory = mkdtempSync(join(tmpdir(), 'baton-explain-'));
let stubbed: Stubbed;
beforeAll(async () => {
  stubbed = await startStubbed({ prefill: 2, decode: 3, prefillBlockSize: 16, decodeBlockSizes: [16, 32, 16] });
});
afterAll(async () => {
  await stubbed[Symbol.asyncDispose]();
  rmSync(directory, { recursive: true });
});

function fileOf(body: unknown): string {
  const path = join(directory, 'request.json');
  writeFileSync(path, typeof body === 'string' ? body : JSON.stringify(body));
  return path;
}

const CHAT = { model: STUB_MODEL, messages: [{ role: 'user', content: 'nobody else reads this' }] };

/** Runs the command as a shell would. */
async function explain(file: string, ...flags: readonly string[]) {
  const { host, seen } = cliHost(['explain', file, ...flags]);
  return { code: await runCli(host), ...seen };
}

const ask = (body: unknown, ...flags: readonly string[]) =>
  explain(fileOf(body), '--router-url', stubbed.rpcUrl, ...flags);
const nameOf = (stub: { readonly url: string } | undefined) => new URL(stub?.url ?? '').host;

describe('baton explain', () => {
  test('shows the plan, and why each other engine is not in it, and changes nothing', async () => {
    const first = await ask(CHAT);
    expect(first.code).toBe(0);
    const rows = first.out.split('\n').slice(2);
    expect(first.out.split('\n')[0]).toBe('plan: prefill_decode (disaggregated), connector nixl');
    expect(rows.map((row) => row.split(/ {2,}/)).filter(([role]) => role !== '')).toEqual([
      ['role', 'instance', 'verdict', 'why'],
      ['prefill', nameOf(stubbed.prefill[0]), 'chosen'],
      ['decode', nameOf(stubbed.decode[0]), 'chosen'],
      ['prefill', nameOf(stubbed.prefill[1]), 'not_picked', '0 in flight'],
      [
        'decode',
        nameOf(stubbed.decode[1]),
        'incompatible_block_size',
        `block_size 32, but ${nameOf(stubbed.prefill[0])} has 16`,
      ],
      ['decode', nameOf(stubbed.decode[2]), 'not_picked', '0 in flight'],
    ]);
    expect(await ask(CHAT)).toEqual(first);
    expect([...stubbed.prefill, ...stubbed.decode].flatMap(({ requests }) => requests)).toEqual([]);
    expect(JSON.stringify(stubbed.log)).not.toContain('nobody else');
  });

  test('--json is the answer of the RPC', async () => {
    const { code, out } = await ask({ model: STUB_MODEL, prompt: 'x', n: 2 }, '--json');
    const { plan } = JSON.parse(out);
    expect([code, plan.mode, plan.reason, plan.prefill]).toEqual([0, 'PLAN_MODE_DECODE_LOCAL', 'n', undefined]);
    expect(plan.verdicts).toHaveLength(2);
  });

  test.each([
    ['{"messages": [', /request\.json is no valid JSON: /],
    ['[]', /request\.json must hold a JSON object, not array/],
    ['{"model": "m"}', /request\.json has neither "messages" \(a chat\) nor "prompt" \(a completion\)/],
  ])('a bad request (%s) is 2, and says what is wrong', async (body, message) => {
    const { code, err } = await ask(body);
    expect(code).toBe(2);
    expect(err).toMatch(message);
  });

  test('a file that is not there is 2', async () => {
    const { code, err } = await explain(join(directory, 'nothing.json'), '--router-url', stubbed.rpcUrl);
    expect(code).toBe(2);
    expect(err).toMatch(/nothing\.json does not exist\n$/);
  });

  test('a model that nobody has is 1', async () => {
    const { code, err } = await ask({ ...CHAT, model: 'other' });
    expect([code, err]).toEqual([1, 'baton: The model `other` does not exist.\n']);
  });

  test('no router is 1, and names the flag', async () => {
    const url = `http://127.0.0.1:${await freePort()}`;
    const { code, err } = await explain(fileOf(CHAT), '--router-url', url);
    expect([code, err]).toEqual([
      1,
      `baton: no router answers at ${url}: nothing listens there; name its RPC port with --router-url\n`,
    ]);
  });

  test('no pair is 1, and says of each engine why', async () => {
    await using odd = await startStubbed({ decode: 1, prefillBlockSize: 16, decodeBlockSizes: [32] });
    const { code, err } = await explain(fileOf(CHAT), '--router-url', odd.rpcUrl);
    const [p, d] = [nameOf(odd.p), nameOf(odd.d)];
    expect(code).toBe(1);
    expect(err).toBe(
      `baton: No engine can take this request at the moment: ${d} incompatible_block_size (block_size 32, but ${p} has 16); ` +
        `${p} incompatible_block_size (block_size 16, but ${d} has 32).\n`,
    );
  });
});
