import { expect, test } from 'vitest';
import { MemoryStore } from '../../src/stores/memory/store.ts';
import { memoryInUse } from '../support/heap.ts';
import { callId, KEY, limits, newEntry } from '../support/kv-store.ts';

test('what the memory store keeps of calls lies outside the heap', async () => {
  const calls = 20_000;
  const store = new MemoryStore({ now: () => performance.now(), limits: limits() });
  const run = async (from: number, to: number) => {
    for (let index = from; index < to; index++) {
      const key = { ...KEY, tenant: `t${index % 16}`, conversationId: `conversation-${index}` };
      await store.put({ id: callId(), entry: newEntry({ key, tokens: null }), derivedKey: false });
      // Every other entry stays.
      if (index % 2 === 0) continue;
      const call = { id: callId(), key, minTokens: 1, compatGroup: '', deadlineMs: 60_000 };
      const result = await store.take(call);
      if (result.kind === 'taken') await store.commit(result.taken.claimId, () => true);
    }
  };
  await run(0, 1000);
  const before = memoryInUse().heap;
  await run(1000, 1000 + calls);
  const after = memoryInUse().heap;
  expect(await store.stats({})).toMatchObject({ entries: 500 + calls / 2, takes: 500 + calls / 2, claims: 0 });
  // As objects claims, the answers of takes and the reasons for later ones made 660 of it; what is left is 20.
  expect((after - before) / calls).toBeLessThan(200);
});
