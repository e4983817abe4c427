import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { RequestFactsSchema, ReuseOutcome } from '../../gen/baton/v1/router_pb.ts';
import { ConversationMemory } from '../../src/services/conversation-memory.ts';

const named = (conversationId: string) => create(RequestFactsSchema, { tenant: 't', model: 'm', conversationId });
const turn = (decodeId: string) => ({ prefillId: 'p', decodeId, noHandle: undefined });

test('the last turn of a conversation is remembered', () => {
  const memory = new ConversationMemory();
  expect(memory.get(named('c'))).toBeUndefined();
  memory.set(named('c'), turn('d1'));
  memory.set(named('c'), { ...turn('d2'), noHandle: ReuseOutcome.MISS_NO_HANDLE });
  expect(memory.get(named('c'))).toEqual({ prefillId: 'p', decodeId: 'd2', noHandle: ReuseOutcome.MISS_NO_HANDLE });
  expect(memory.get(named('other'))).toBeUndefined();
});

test.each([{ tenant: 'other' }, { model: 'other' }, { cacheSalt: 'other' }])(
  'a conversation of the same name is another one with %o',
  (other) => {
    const memory = new ConversationMemory();
    memory.set(named('c'), turn('d1'));
    expect(memory.get({ ...named('c'), ...other })).toBeUndefined();
  },
);

test('a history is looked under in its order, and not where it may be the first turn', () => {
  const memory = new ConversationMemory();
  memory.set(named('long'), turn('d1'));
  memory.set(named('short'), turn('d2'));
  const found = { ...named('own'), lookupConversationIds: ['none', 'long', 'short'], derivedConversation: true };
  expect(memory.get({ ...found, continues: true })?.decodeId).toBe('d1');
  expect(memory.get({ ...found, continues: false })).toBeUndefined();
});

test('what was used longest ago is forgotten first', () => {
  const memory = new ConversationMemory(3);
  for (const name of ['a', 'b', 'c']) memory.set(named(name), turn(name));
  memory.get(named('a'));
  memory.set(named('b'), turn('b again'));
  memory.set(named('d'), turn('d'));
  const last = ['a', 'b', 'c', 'd'].map((name) => memory.get(named(name))?.decodeId);
  expect(last).toEqual(['a', 'b again', undefined, 'd']);
});
