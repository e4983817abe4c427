import { describe, expect, test } from 'vitest';
import { cutHandle, releaseHandle, withPromptTokenIds } from '../../src/core/handle-edit.ts';
import { decodeKvTransferParams, encodeKvTransferParams } from '../../src/core/kv-transfer.ts';

const HANDLE = {
  do_remote_prefill: false,
  do_remote_decode: true,
  remote_block_ids: [[11, 12, 13, 14]],
  remote_engine_id: 'eng-d',
  remote_request_id: 'chatcmpl-1-9f8e7d6c',
  remote_host: '10.0.0.2',
  remote_port: 5601,
  tp_size: 1,
  remote_num_tokens: 60,
  remote_blocks_expiry_time: 90_211.25,
  zz: ['kept', 1.5],
};

function decode(value: unknown) {
  const params = decodeKvTransferParams(new TextEncoder().encode(JSON.stringify(value)));
  if (params === undefined) throw new Error('no handle');
  return params;
}

function json(params: Parameters<typeof encodeKvTransferParams>[0] | undefined): unknown {
  return params === undefined ? undefined : JSON.parse(new TextDecoder().decode(encodeKvTransferParams(params)));
}

describe('cutHandle', () => {
  test.each([
    [60, [11, 12, 13, 14]],
    [49, [11, 12, 13, 14]],
    [48, [11, 12, 13]],
    [33, [11, 12, 13]],
    [32, [11, 12]],
    [1, [11]],
  ])('to %i tokens leaves these blocks, and all else as it was', (tokens, ids) => {
    const cut = json(cutHandle(decode(HANDLE), tokens, 16));
    expect(cut).toEqual({ ...HANDLE, remote_num_tokens: tokens, remote_block_ids: [ids] });
  });

  test('the handle that is cut stays whole', () => {
    const params = decode(HANDLE);
    cutHandle(params, 16, 16);
    expect(json(params)).toEqual(HANDLE);
  });

  test.each([
    ['more tokens than it has', HANDLE, 61, 16],
    ['no token', HANDLE, 0, 16],
    ['an unknown block size', HANDLE, 32, 0],
    ['several KV groups', { ...HANDLE, remote_block_ids: [[1, 2, 3, 4], [5]] }, 32, 16],
    ['too few blocks', { ...HANDLE, remote_block_ids: [[1]] }, 32, 16],
    ['an unknown count', { ...HANDLE, remote_num_tokens: null }, 32, 16],
    ['no blocks', { ...HANDLE, remote_block_ids: null }, 32, 16],
  ])('%s: it cannot be cut', (_, handle, tokens, blockSize) => {
    expect(cutHandle(decode(handle), tokens, blockSize)).toBeUndefined();
  });
});

describe('releaseHandle', () => {
  test('a count of 0, and all else as it was', () => {
    expect(json(releaseHandle(decode(HANDLE)))).toEqual({ ...HANDLE, remote_num_tokens: 0 });
  });

  test('a count that is no number is left alone', () => {
    expect(releaseHandle(decode({ ...HANDLE, remote_num_tokens: 'x' }))).toBeUndefined();
  });
});

describe('withPromptTokenIds', () => {
  const add = (text: string, ids: readonly number[]) =>
    new TextDecoder().decode(withPromptTokenIds(new TextEncoder().encode(text), ids));

  test('adds the ids and touches no other byte', () => {
    expect(add('{ "a" : 1.50,"b":[ 1 ]}', [7, 8])).toMatch(
      /^\{ "a" : 1\.50,"b":\[ 1 \].*"prompt_token_ids":\[7,8\]\}$/,
    );
    expect(JSON.parse(add('{}', [7]))).toEqual({ prompt_token_ids: [7] });
  });

  test('replaces ids that are there', () => {
    expect(JSON.parse(add('{"prompt_token_ids":[1],"a":2}', [3]))).toEqual({ prompt_token_ids: [3], a: 2 });
  });

  test('only an object can take them', () => {
    expect(() => add('[]', [1])).toThrow(TypeError);
  });
});
