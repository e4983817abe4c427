import { describe, expect, test } from 'vitest';
import { type LoadContext, legOf, planLoad } from '../../src/sim/kv-params.ts';

const context: LoadContext = { promptTokens: 100, localHit: 0, blockSize: 16, bidirectional: true, threshold: 64 };
const coordinates = {
  remote_block_ids: [[1, 2, 3, 4, 5, 6, 7]],
  remote_engine_id: 'e',
  remote_request_id: 'r',
  remote_host: 'h',
  remote_port: 5600,
};
const toDecode = { ...coordinates, do_remote_prefill: true, do_remote_decode: false };
const toPrefill = { ...coordinates, do_remote_prefill: false, do_remote_decode: true, remote_num_tokens: 100 };

test('the flags make the leg', () => {
  expect(legOf(toDecode)).toBe('decode');
  expect(legOf(toPrefill)).toBe('prefill');
  for (const value of [undefined, null, 'x', [], {}, { foo: 1 }]) expect(legOf(value)).toBe('plain');
});

describe('decode leg', () => {
  test('pulls all tokens beyond the local hit into the blocks that are left', () => {
    expect(planLoad(toDecode, context)).toMatchObject({ kind: 'pull', side: 'decode', tokens: 100, blocks: 7 });
    expect(planLoad(toDecode, { ...context, localHit: 32 })).toMatchObject({ kind: 'pull', tokens: 68, blocks: 5 });
    expect(planLoad(toDecode, { ...context, localHit: 100 })).toMatchObject({ kind: 'notify' });
  });

  test('does not care about the threshold or the bidirectional setting', () => {
    const off = { ...context, localHit: 96, bidirectional: false };
    expect(planLoad(toDecode, off)).toMatchObject({ kind: 'pull', tokens: 4, blocks: 1 });
  });

  test.each([
    [{ ...toDecode, remote_block_ids: [] }],
    [{ ...toDecode, remote_block_ids: [[1], [2]] }],
    [{ ...toDecode, remote_block_ids: [['1', '2', '3', '4', '5', '6', '7']] }],
    [{ ...toDecode, remote_block_ids: [[1, 2, 3, 4, 5, 6]] }],
    [{ ...toDecode, remote_port: null }],
    [{ ...toDecode, remote_port: 'x' }],
  ])('dies of %j', (params) => {
    expect(planLoad(params, context)).toMatchObject({ kind: 'crash', silent: false });
  });

  test('takes more blocks than it needs and a port as text', () => {
    const long = { ...toDecode, remote_block_ids: [[1, 2, 3, 4, 5, 6, 7, 8, 9]], remote_port: '5600' };
    expect(planLoad(long, context)).toMatchObject({ kind: 'pull', blocks: 7, target: { port: 5600 } });
  });
});

describe('prefill leg', () => {
  test('without coordinates it is plain', () => {
    const nulls = Object.fromEntries(Object.keys(coordinates).map((key) => [key, null]));
    expect(planLoad({ do_remote_decode: true }, context)).toEqual({ kind: 'none' });
    expect(planLoad({ do_remote_decode: true, ...nulls }, context)).toEqual({ kind: 'none' });
    const { remote_host: _, ...rest } = toPrefill;
    expect(planLoad(rest, context)).toEqual({ kind: 'none' });
  });

  test('pulls what the handle covers, if it is worth it', () => {
    expect(planLoad({ ...toPrefill, remote_num_tokens: 70 }, context)).toMatchObject({
      kind: 'pull',
      tokens: 70,
      blocks: 5,
    });
    expect(planLoad({ ...toPrefill, remote_num_tokens: 500 }, context)).toMatchObject({ kind: 'pull', tokens: 100 });
    expect(planLoad({ ...toPrefill, remote_num_tokens: 64 }, context)).toMatchObject({ kind: 'pull', tokens: 64 });
    expect(planLoad({ ...toPrefill, remote_num_tokens: 63 }, context)).toMatchObject({ kind: 'notify' });
    expect(planLoad({ ...toPrefill, remote_num_tokens: 0 }, context)).toMatchObject({ kind: 'notify' });
    expect(planLoad(toPrefill, { ...context, localHit: 48 })).toMatchObject({ kind: 'notify' });
    expect(planLoad(toPrefill, { ...context, localHit: 48, threshold: 0 })).toMatchObject({ kind: 'pull', tokens: 52 });
  });

  test('hangs where the engine does', () => {
    expect(planLoad(toPrefill, { ...context, bidirectional: false })).toMatchObject({ kind: 'hang' });
    expect(planLoad({ ...toPrefill, remote_block_ids: [1, 2, 3] }, context)).toMatchObject({ kind: 'hang' });
    const small = { ...toPrefill, remote_num_tokens: 20 };
    expect(planLoad(small, { ...context, bidirectional: false })).toEqual({ kind: 'none' });
  });

  test('dies of a count that is text, and of too few blocks', () => {
    expect(planLoad({ ...toPrefill, remote_num_tokens: '100' }, context)).toMatchObject({ kind: 'crash' });
    expect(planLoad({ ...toPrefill, remote_block_ids: [[1, 2]] }, context)).toMatchObject({ kind: 'crash' });
  });
});
