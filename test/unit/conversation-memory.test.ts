import { expect, test } from 'vitest';
import { ReuseOutcome } from '../../gen/baton/v1/router_pb.ts';
import { ConversationMemory } from '../../src/services/conversation-memory.ts';

const turn = (decodeId: string) => ({ prefillId: 'p', decodeId, noHandle: undefined });

test('the last turn of a conversation is remembered', () => {
  const memory = new ConversationMemory();
  expect(memory.get('c')).toBeUndefined();
  memory.set('c', turn('d1'));
  memory.set('c', { ...turn('d2'), noHandle: ReuseOutcome.MISS_NO_HANDLE });
  expect(memory.get('c')).toEqual({ prefillId: 'p', decodeId: 'd2', noHandle: ReuseOutcome.MISS_NO_HANDLE });
  expect(memory.get('other')).toBeUndefined();
});

test('what was used longest ago is forgotten first', () => {
  const memory = new ConversationMemory(3);
  for (const key of ['a', 'b', 'c']) memory.set(key, turn(key));
  memory.get('a');
  memory.set('b', turn('b again'));
  memory.set('d', turn('d'));
  expect(['a', 'b', 'c', 'd'].map((key) => memory.get(key)?.decodeId)).toEqual(['a', 'b again', undefined, 'd']);
});
