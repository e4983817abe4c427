import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { chatWithPlan } from '../support/conversation.ts';
import { contentOf, post, startHarness } from '../support/harness.ts';

const MODELS = ['sim-model', { id: 'style', root: '/adapters/style', parent: 'sim-model' }] as const;
const ENGINE = { bidirectional: true, eosEvery: 0, maxModelLen: 8192, models: MODELS };
const YAML = 'pools: {prefill: {bidirectional: on}}\n';

/** A conversation with an adapter, and the answers that one engine gives. */
async function start(runtimeAdapters: boolean) {
  const harness = await startHarness({ engine: { ...ENGINE, runtimeAdapters }, yaml: YAML });
  onTestFinished(() => harness[Symbol.asyncDispose]());
  await harness.ready();
  const messages = [{ role: 'user', content: 'Of relays and their runners. '.repeat(8) }];
  const turn = async () => {
    const body = { model: 'style', messages, max_tokens: 24 };
    const reply = await chatWithPlan(harness.url, { ...body, conversation_id: 'c' });
    const right = contentOf((await post(`${harness.plain.url}/v1/chat/completions`, body)).text).texts[0] ?? '';
    expect(contentOf(reply.text).texts[0], reply.text).toBe(right);
    messages.push({ role: 'assistant', content: right }, { role: 'user', content: 'And then?' });
    return /outcome=(\w+)/.exec(reply.headers.get('x-baton-plan') ?? '')?.[1];
  };
  return { harness, turn };
}

test('an adapter that stays what it is is reused like a model', async () => {
  const { turn } = await start(false);
  expect([await turn(), await turn(), await turn()]).toEqual(['none', 'hit', 'hit']);
});

test('an adapter that can be replaced under its name is not: what was computed before is not its own any more', async () => {
  const { harness, turn } = await start(true);
  const folder = await mkdtemp(join(tmpdir(), 'baton-adapter-'));
  onTestFinished(() => rm(folder, { recursive: true, force: true }));
  const path = join(folder, 'style');
  expect([await turn(), await turn()]).toEqual(['none', 'miss_unsupported']);
  await writeFile(path, 'other weights');
  for (const { url } of [...harness.prefill, ...harness.decode, harness.plain]) {
    const loaded = { lora_name: 'style', lora_path: path, load_inplace: true };
    expect((await post(`${url}/v1/load_lora_adapter`, loaded)).status).toBe(200);
  }
  expect(await turn()).toBe('miss_unsupported');
  // Nothing waits in a decode engine for a reader that must not come.
  const pins = () => harness.decode.reduce((sum, sim) => sum + sim.state().pins, 0);
  await expect.poll(pins, { timeout: 10_000 }).toBe(0);
});
