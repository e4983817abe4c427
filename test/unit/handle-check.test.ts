import { readdirSync, readFileSync } from 'node:fs';
import { create } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { type KvTransferParams, KvTransferParamsSchema } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { checkHandle, type HandleDefect, type HandleWant } from '../../src/core/handle-check.ts';
import { decodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { utf8 } from './json-text.ts';

const SAMPLES = new URL('../fixtures/engine-samples/', import.meta.url);

const HANDLE: Readonly<Record<string, string>> = {
  do_remote_prefill: 'true',
  do_remote_decode: 'false',
  remote_block_ids: '[[7,8,9]]',
  remote_engine_id: '"eng-p"',
  remote_request_id: '"chatcmpl-5b1e-1a2b3c4d"',
  remote_host: '"10.0.0.1"',
  remote_port: '5600',
  tp_size: '1',
  dcp_size: '1',
  pp_size: '1',
  remote_num_tokens: '40',
  remote_blocks_expiry_time: 'null',
  remote_registration_generation: '0',
  transfer_mode: '"pull"',
  remote_prefill_cached_tokens: '0',
};

/** The handle with members replaced, or left out where the text is undefined. */
function handle(changes: Readonly<Record<string, string | undefined>> = {}): KvTransferParams {
  const members = Object.entries({ ...HANDLE, ...changes }).filter(([, json]) => json !== undefined);
  const m = decodeKvTransferParams(utf8(`{${members.map(([key, json]) => `"${key}":${json}`).join(',')}}`));
  if (m === undefined) throw new Error('not decoded');
  return m;
}

const toDecode: HandleWant = { flag: 'do_remote_prefill', blockSize: 16 };

describe('checkHandle', () => {
  test('a handle of prefill goes to decode, one of decode to prefill', () => {
    expect(checkHandle(handle(), toDecode)).toEqual({ ok: true, numTokens: 40, blocks: 3 });
    const back = handle({ do_remote_prefill: 'false', do_remote_decode: 'true', remote_blocks_expiry_time: '1519.5' });
    expect(checkHandle(back, { flag: 'do_remote_decode', blockSize: 16 })).toEqual({
      ok: true,
      numTokens: 40,
      blocks: 3,
    });
    expect(checkHandle(back, toDecode)).toEqual({ ok: false, reason: 'wrong_flags' });
    expect(checkHandle(handle(), { flag: 'do_remote_decode' })).toEqual({ ok: false, reason: 'wrong_flags' });
  });

  test.each<[string, Readonly<Record<string, string | undefined>>]>([
    ['the other flag absent', { do_remote_decode: undefined }],
    ['a port in a string', { remote_port: '"5600"' }],
    ['an older engine', { dcp_size: undefined, pp_size: undefined, remote_registration_generation: undefined }],
    ['an even older engine', { transfer_mode: undefined, tp_size: undefined, remote_blocks_expiry_time: undefined }],
    ['no heartbeats', { tp_size: 'null' }],
    ['larger tensor parallelism', { tp_size: '8' }],
    ['an unknown member', { anything: '{"a":[1]}' }],
    ['a float in any spelling', { remote_blocks_expiry_time: '1519.0' }],
    ['a host with escapes', { remote_host: '"caf\\u00e9"' }],
    ['compared token ids', { prompt_token_ids: '[1,2]' }],
  ])('takes %s', (_name, changes) => {
    expect(checkHandle(handle(changes), toDecode)).toEqual({ ok: true, numTokens: 40, blocks: 3 });
  });

  test.each<[HandleDefect, Readonly<Record<string, string | undefined>>]>([
    ['wrong_flags', { do_remote_prefill: undefined }],
    ['wrong_flags', { do_remote_prefill: 'false' }],
    ['wrong_flags', { do_remote_prefill: '1' }],
    ['wrong_flags', { do_remote_prefill: '"true"' }],
    ['wrong_flags', { do_remote_decode: 'true' }],
    ['wrong_flags', { do_remote_decode: 'null' }],
    ['no_block_ids', { remote_block_ids: undefined }],
    ['no_block_ids', { remote_block_ids: 'null' }],
    ['flat_block_ids', { remote_block_ids: '[7,8,9]' }],
    ['bad_block_ids', { remote_block_ids: '[[7,-8,9]]' }],
    ['bad_block_ids', { remote_block_ids: '[[7,8.0,9]]' }],
    ['bad_block_ids', { remote_block_ids: '[["7",8,9]]' }],
    ['bad_block_ids', { remote_block_ids: '[[7,null,9]]' }],
    ['bad_block_ids', { remote_block_ids: '[7,[8]]' }],
    ['bad_block_ids', { remote_block_ids: '"7"' }],
    ['kv_group_count', { remote_block_ids: '[[7,8,9],[7]]' }],
    ['empty_block_ids', { remote_block_ids: '[]' }],
    ['empty_block_ids', { remote_block_ids: '[[]]' }],
    ['bad_engine_id', { remote_engine_id: undefined }],
    ['bad_engine_id', { remote_engine_id: 'null' }],
    ['bad_engine_id', { remote_engine_id: '""' }],
    ['bad_engine_id', { remote_engine_id: '7' }],
    ['bad_request_id', { remote_request_id: undefined }],
    ['bad_request_id', { remote_request_id: '""' }],
    ['bad_host', { remote_host: undefined }],
    ['bad_host', { remote_host: 'null' }],
    ['bad_host', { remote_host: '""' }],
    ['bad_port', { remote_port: undefined }],
    ['bad_port', { remote_port: '0' }],
    ['bad_port', { remote_port: '65536' }],
    ['bad_port', { remote_port: '"56x"' }],
    ['bad_port', { remote_port: '5600.5' }],
    ['not_pull', { transfer_mode: '"push"' }],
    ['not_pull', { transfer_mode: 'null' }],
    ['bad_tp_size', { tp_size: '0' }],
    ['bad_tp_size', { tp_size: '"1"' }],
    ['dcp_not_1', { dcp_size: '2' }],
    ['dcp_not_1', { dcp_size: 'null' }],
    ['pp_not_1', { pp_size: '2' }],
    ['pp_not_1', { pp_size: '1.0' }],
    ['bad_num_tokens', { remote_num_tokens: '"40"' }],
    ['bad_num_tokens', { remote_num_tokens: '40.0' }],
    ['bad_num_tokens', { remote_num_tokens: 'null' }],
    ['bad_num_tokens', { remote_num_tokens: '0' }],
    ['bad_num_tokens', { remote_num_tokens: '-40' }],
    ['bad_expiry_time', { remote_blocks_expiry_time: '"1519.5"' }],
    ['bad_expiry_time', { remote_blocks_expiry_time: 'true' }],
    ['bad_generation', { remote_registration_generation: '-1' }],
    ['bad_cached_tokens', { remote_prefill_cached_tokens: '[]' }],
    ['bad_prompt_token_ids', { prompt_token_ids: '[]' }],
    ['bad_prompt_token_ids', { prompt_token_ids: '[1.5]' }],
    ['duplicate_key', { 'remote\\u005fport': '5600' }],
  ])('%s: %j', (reason, changes) => {
    expect(checkHandle(handle(changes), toDecode)).toEqual({ ok: false, reason });
  });

  test.each<[number, number, number, boolean]>([
    [1, 16, 1, true],
    [16, 16, 1, true],
    [17, 16, 2, true],
    [48, 16, 3, true],
    [49, 16, 3, false],
    [32, 16, 3, false],
    [40, 128, 3, false],
    [40, 0, 3, true],
  ])('%i tokens in blocks of %i are %i blocks: %s', (tokens, blockSize, blocks, ok) => {
    const ids = JSON.stringify([Array.from({ length: blocks }, (_, i) => i)]);
    const m = handle({ remote_num_tokens: String(tokens), remote_block_ids: ids });
    expect(checkHandle(m, { flag: 'do_remote_prefill', blockSize })).toEqual(
      ok ? { ok, numTokens: tokens, blocks } : { ok, reason: 'block_count_mismatch' },
    );
  });

  test('without a token count or a block size only the shape is checked', () => {
    const m = handle({ remote_num_tokens: undefined });
    expect(checkHandle(m, toDecode)).toEqual({ ok: true, numTokens: undefined, blocks: 3 });
    expect(checkHandle(handle({ remote_num_tokens: '4000' }), { flag: 'do_remote_prefill' })).toMatchObject({
      ok: true,
    });
  });

  test('a message made elsewhere cannot smuggle a second member in', () => {
    const m = create(KvTransferParamsSchema, handle());
    m.extra.push({ $typeName: 'baton.v1.KvExtraMember', key: 'x', json: '1,"remote_port":1' });
    expect(checkHandle(m, toDecode)).toEqual({ ok: false, reason: 'bad_member' });
  });

  test('every handle that a recorded engine answered passes, at its block size of 128', () => {
    let checked = 0;
    for (const name of readdirSync(SAMPLES).filter((n) => n.endsWith('.json') && !n.endsWith('.request.json'))) {
      const sample: unknown = JSON.parse(readFileSync(new URL(name, SAMPLES), 'utf8'));
      const body = (sample as { body: { kv_transfer_params?: { do_remote_prefill?: boolean } } | null }).body;
      const params = typeof body === 'object' ? body?.kv_transfer_params : undefined;
      if (params?.do_remote_prefill === undefined) continue;
      const m = decodeKvTransferParams(utf8(JSON.stringify(params)));
      const flag = params.do_remote_prefill ? 'do_remote_prefill' : 'do_remote_decode';
      expect(m && checkHandle(m, { flag, blockSize: 128 }), name).toMatchObject({ ok: true });
      checked++;
    }
    expect(checked).toBeGreaterThan(60);
  });
});
