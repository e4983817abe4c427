import { describe, expect, test } from 'vitest';
import type { LegTarget } from '../../src/connectors/connector.ts';
import { nixl } from '../../src/connectors/nixl.ts';
import { decodeKvTransferParams } from '../../src/core/kv-transfer.ts';

const bytes = (value: unknown) => new TextEncoder().encode(JSON.stringify(value));
const text = (value: Uint8Array | string | undefined) =>
  typeof value === 'string' || value === undefined ? value : new TextDecoder().decode(value);

const HANDLE = {
  do_remote_prefill: true,
  do_remote_decode: false,
  remote_block_ids: [[4, 5]],
  remote_engine_id: 'p',
  remote_request_id: 'chatcmpl-a-0011aabb',
  remote_host: '10.0.0.1',
  remote_port: 5600,
  tp_size: 1,
  remote_num_tokens: 20,
  remote_blocks_expiry_time: null,
  from_a_later_version: 2 ** 60,
};

function target(more: Partial<LegTarget> = {}): LegTarget {
  return { instanceId: 'i', url: 'http://10.0.0.1:8100', blockSize: 16, templateFingerprint: '0:aa', ...more };
}

const facts = {
  model: 'm',
  stream: true,
  conversationId: '',
  cacheSalt: '',
  priority: 0,
  localReasons: [],
  refused: [],
  continues: false,
  returnTokenIds: false,
};

const cold = { facts, target: target(), promptTokenIds: [], reportTokenIds: false, hasMaxCompletionTokens: false };

describe('the prefill leg', () => {
  test('cold: only the flag, one token, no stream', () => {
    const edits = nixl.prefill({ ...cold, api: 'chat.completions' });
    expect(Object.fromEntries([...edits.set].map(([key, value]) => [key, text(value)]))).toEqual({
      stream: 'false',
      max_tokens: '1',
      kv_transfer_params: '{"do_remote_decode":true,"do_remote_prefill":false}',
    });
    expect([...edits.drop]).toEqual(
      expect.arrayContaining(['conversation_id', 'stream_options', 'min_tokens', 'echo']),
    );
  });

  test('warm: the stored handle with the compared ids, which P is to report back', () => {
    const params = decodeKvTransferParams(bytes({ ...HANDLE, do_remote_prefill: false, do_remote_decode: true }));
    if (params === undefined) throw new Error('no handle');
    const warm = { params, promptTokenIds: [1, 2, 3], isRendered: false };
    const chat = nixl.prefill({ ...cold, api: 'chat.completions', hasMaxCompletionTokens: true, warm });
    expect(chat.set.get('max_completion_tokens')).toBe('1');
    expect(chat.set.get('return_token_ids')).toBe('true');
    expect(text(chat.set.get('kv_transfer_params'))).toMatch(
      /"do_remote_decode":true.*,"prompt_token_ids":\[1,2,3\]\}$/,
    );
    const completion = nixl.prefill({ ...cold, api: 'completions', warm });
    expect(text(completion.set.get('prompt'))).toBe('[1,2,3]');
    expect(text(completion.set.get('kv_transfer_params'))).not.toContain('prompt_token_ids');
    // What P renders itself it is not told; it reports all the same.
    const media = nixl.prefill({ ...cold, api: 'chat.completions', warm: { ...warm, isRendered: true } });
    expect(text(media.set.get('kv_transfer_params'))).not.toContain('prompt_token_ids');
    expect(media.set.get('return_token_ids')).toBe('true');
  });

  test('cold, with ids that are known: P uses them, and reports them only where D can take them', () => {
    const known = { ...cold, promptTokenIds: [7, 8] };
    const chat = nixl.prefill({ ...known, api: 'chat.completions' });
    expect(text(chat.set.get('kv_transfer_params'))).toBe(
      '{"do_remote_decode":true,"do_remote_prefill":false,"prompt_token_ids":[7,8]}',
    );
    expect(chat.set.has('return_token_ids')).toBe(false);
    const completion = nixl.prefill({ ...known, api: 'completions', reportTokenIds: true });
    expect(text(completion.set.get('prompt'))).toBe('[7,8]');
    expect(completion.set.get('return_token_ids')).toBe('true');
  });
});

describe("P's reply", () => {
  const read = (value: unknown, prefill = target(), decode = target({ url: 'http://10.0.0.2:8200' })) =>
    nixl.readPrefillReply(value === undefined ? undefined : bytes(value), { prefill, decode, remoteHost: 'auto' });

  test('a good handle goes on as the very bytes that came', () => {
    const raw = bytes(HANDLE);
    const context = { prefill: target(), decode: target(), remoteHost: 'auto' as const };
    const reading = nixl.readPrefillReply(raw, context);
    expect(reading.kind === 'handle' && reading.handle.json).toBe(raw);
  });

  test.each([
    ['absent', undefined, {}, {}],
    ['block_size_differs', HANDLE, {}, { blockSize: 128 }],
    ['template_differs', HANDLE, {}, { templateFingerprint: '0:bb' }],
    [
      'loopback_host',
      { ...HANDLE, remote_host: 'localhost' },
      { url: 'http://localhost:8100' },
      { url: 'http://10.0.0.2:8200' },
    ],
  ] as const)('%s: D runs alone', (reason, value, prefill, decode) => {
    expect(read(value, target(prefill), target(decode))).toEqual({ kind: 'none', reason });
  });

  test('what is not known is not compared', () => {
    expect(read(HANDLE, target({ templateFingerprint: '', blockSize: 0 }), target({ blockSize: 0 })).kind).toBe(
      'handle',
    );
  });
});
