import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { PlanMode, RequestFactsSchema } from '../../gen/baton/v1/router_pb.ts';
import { Bindings } from '../../src/services/bindings.ts';
import { decodeOf, prefillOf } from '../support/plan-instances.ts';

const facts = (conversationId: string, tenant = 't', model = 'm') =>
  create(RequestFactsSchema, { conversationId, tenant, model });

function decision(prefill: readonly string[], decode: readonly string[]) {
  const [mode, reason] = [PlanMode.PREFILL_DECODE, 'disaggregated'];
  return { kind: 'plan', mode, reason, prefill: prefill.map((id) => prefillOf(id)), ...pool(decode) } as const;
}
const pool = (decode: readonly string[]) => ({ decode: decode.map((id) => decodeOf(id)), verdicts: [] });

function setup(limit?: number) {
  const moves: string[] = [];
  const bindings = new Bindings((place, reason) => moves.push(`${place} ${reason}`), limit);
  const place = (of: ReturnType<typeof facts>, ...pools: Parameters<typeof decision>) => {
    const placed = bindings.place(of, decision(...pools));
    const ids = (instances: readonly Instance[]) => instances.map(({ id }) => id).join(' ');
    return [ids(placed.decision.prefill), ids(placed.decision.decode), placed.picked.join(' ')];
  };
  return { bindings, moves, place };
}

const BOTH = 'prefill decode';
const [P, D] = [
  ['p2', 'p1'],
  ['d1', 'd2'],
] as const;

test('the first plan binds; the order of the rest stays', () => {
  const { place, moves } = setup();
  expect(place(facts('a'), ['p1', 'p2'], ['d1', 'd2'])).toEqual(['p1 p2', 'd1 d2', BOTH]);
  expect(place(facts('a'), ['p3', 'p2', 'p1'], ['d2', 'd1'])).toEqual(['p1 p3 p2', 'd1 d2', '']);
  for (const other of [facts('b'), facts('a', 'u'), facts('a', 't', 'n')]) expect(place(other, P, D)[0]).toBe('p2 p1');
  expect(moves).toEqual([]);
});

test('without a name every plan is a turn', () => {
  const { place } = setup();
  expect(place(facts(''), ['p1', 'p2'], ['d1'])).toEqual(['p1 p2', 'd1', BOTH]);
  expect(place(facts(''), P, ['d1'])).toEqual(['p2 p1', 'd1', BOTH]);
});

test('an instance that cannot be chosen is replaced for good; a plan of one leg keeps the other', () => {
  const { place, moves } = setup();
  place(facts('a'), ['p1', 'p2'], ['d1', 'd2']);
  expect(place(facts('a'), [], ['d1', 'd2'])).toEqual(['', 'd1 d2', '']);
  expect(place(facts('a'), P, ['d2'])).toEqual(['p1 p2', 'd2', 'decode']);
  expect(place(facts('a'), P, D)).toEqual(['p1 p2', 'd2 d1', '']);
  expect(moves).toEqual(['decode gone']);
});

test('a request that a fallback served moves the conversation, unless it has moved already', () => {
  const { bindings, place, moves } = setup();
  place(facts('a'), ['p1', 'p2'], ['d1', 'd2']);
  const planned = { prefill: 'p1', decode: 'd1' };
  bindings.served(facts('a'), planned, { prefill: 'p1', decode: undefined });
  bindings.served(facts('a'), planned, { prefill: 'p2', decode: 'd1' });
  bindings.served(facts('a'), planned, { prefill: 'p1', decode: 'd1' });
  bindings.served(facts('a'), planned, { prefill: 'p3', decode: 'd1' });
  bindings.served(facts('unknown'), planned, { prefill: 'p2' });
  expect(place(facts('a'), ['p1', 'p3', 'p2'], ['d1', 'd2'])[0]).toBe('p2 p1 p3');
  expect(moves).toEqual(['prefill failed']);
});

test('looking binds nothing, and the conversations that were quiet longest are forgotten', () => {
  const { bindings, place } = setup(2);
  expect(bindings.bound(facts('a'))).toBeUndefined();
  place(facts('a'), ['p1', 'p2'], D);
  place(facts('b'), ['p1', 'p2'], D);
  expect(bindings.bound(facts('a'))?.prefill).toBe('p1');
  place(facts('a'), P, D);
  place(facts('c'), P, D);
  expect(bindings.bound(facts('a'))?.prefill).toBe('p1');
  expect(bindings.bound(facts('b'))).toBeUndefined();
});
