import { create, equals, fromBinary, fromJson, toBinary, toJson } from '@bufbuild/protobuf';
import fc from 'fast-check';
import { describe, expect, test } from 'vitest';
import { type KvTransferParams, KvTransferParamsSchema } from '../../gen/baton/v1/kv_transfer_pb.ts';
import {
  blockIds,
  decodeKvTransferParams,
  encodeKvTransferParams,
  hasDuplicateKeys,
  hasValidMembers,
  memberText,
  numTokens,
  remotePort,
  stringMember,
} from '../../src/core/kv-transfer.ts';
import { numberText, objectText, stringText, textOf, utf8, valueText, withoutSpace } from './json-text.ts';

const HANDLE =
  '{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"eng-p",' +
  '"remote_request_id":"chatcmpl-5b1e-1a2b3c4d","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,' +
  '"pp_size":1,"remote_num_tokens":40,"remote_blocks_expiry_time":null,"remote_registration_generation":0,' +
  '"transfer_mode":"pull","remote_prefill_cached_tokens":0}';

function decode(text: string): KvTransferParams {
  const m = decodeKvTransferParams(utf8(text));
  if (m === undefined) throw new Error(`not decoded: ${text}`);
  return m;
}

function encode(m: KvTransferParams): string {
  return textOf(encodeKvTransferParams(m));
}

function isTyped(m: KvTransferParams): boolean {
  return m.extra.length === 0 && m.memberOrder.length === 0;
}

// ---- generators -------------------------------------------------------------------------------------------------

const uint = fc.oneof(fc.nat(), fc.constantFrom(0, 1, 4_294_967_295));
const uints = fc.array(uint, { maxLength: 4 });
const text = fc.string({ unit: 'grapheme', maxLength: 8 });
const ports = fc.record({ ports: uints });
const peer = fc.record({ kvRequestId: text, remoteHost: text, remotePort: uint }, { requiredKeys: [] });
const blocks = fc.oneof(
  fc.record({ groups: fc.array(fc.record({ ids: uints }), { maxLength: 3 }) }),
  fc.record({ flat: fc.array(uint, { minLength: 1, maxLength: 4 }) }),
);
const common = {
  doRemotePrefill: fc.boolean(),
  doRemoteDecode: fc.boolean(),
  remoteBlockIds: blocks,
  remoteEngineId: text,
  remoteRequestId: text,
  remoteHost: text,
  remotePort: uint,
  tpSize: uint,
  dcpSize: uint,
  ppSize: uint,
  remoteNumTokens: uint,
  remoteBlocksExpiryTime: fc.double({ noNaN: true, noDefaultInfinity: true }).map((n) => n + 0),
  remoteRegistrationGeneration: uint,
  transferMode: text,
  remotePrefillCachedTokens: uint,
  promptTokenIds: fc.record({ ids: uints }),
  transferId: text,
};
const families = {
  mooncake: { remoteBootstrapAddr: text },
  moriio: {
    remoteHandshakePort: uint,
    remoteNotifyPort: uint,
    remoteDpRank: uint,
    remoteDpRankOverride: fc.boolean(),
    remoteDpSize: uint,
    remoteDpSizeLocal: uint,
    remoteTpSize: uint,
    remoteHosts: fc.record({ hosts: fc.array(text, { maxLength: 3 }) }),
    isRequestLeader: fc.boolean(),
  },
  lmcache: {
    retFirstTok: fc.boolean(),
    disaggSpec: fc.record(
      { reqId: text, receiverHost: text, receiverInitPort: ports, receiverAllocPort: ports },
      { requiredKeys: [] },
    ),
    firstTok: uint,
    numLmcacheCachedTokens: uint,
    numLmcacheExtraCachedTokens: uint,
  },
  offloading: {
    remoteDecoder: peer,
    remotePrefiller: peer,
    remoteKvSource: peer,
    maxLoadTokens: uint,
    maxOffloadTokens: uint,
  },
};
const family = fc.option(
  fc.oneof(
    ...Object.entries(families).map(([name, fields]) =>
      fc
        .record<Record<string, unknown>>(fields, { requiredKeys: [] })
        .filter((value) => Object.keys(value).length > 0)
        .map((value) => ({ case: name, value })),
    ),
  ),
);

function snake(name: string): string {
  return name.replaceAll(/[A-Z]/g, (c) => `_${c.toLowerCase()}`);
}

const COMMON_KEYS = Object.keys(common).map(snake);
const FAMILY_KEYS = Object.values(families).flatMap((fields) => Object.keys(fields).map(snake));

// In the contract's field-number order, written down here once more on purpose.
const KEYS = [...COMMON_KEYS, ...FAMILY_KEYS];

const unknownKey = fc.oneof(
  fc.constantFrom('foo', '_p_side_truncated', 'lmcache.tag', '__proto__', '', 'caf\\u00e9', 'a\\/b', '\\ud800'),
  text.map((s) => JSON.stringify(s).slice(1, -1)),
);

/** Texts that no typed field of any kind can hold. */
const untypable = fc.constantFrom(
  '-1.0',
  '1e3',
  '18446744073709551617',
  '9007199254740993',
  '-0',
  '[[-1]]',
  '[1,[2]]',
  '{"a":1,"a":1}',
  '"\\u0041"',
  '[1.0]',
);

/** Messages as decode makes them, built field by field without it. */
const canonical: fc.Arbitrary<KvTransferParams> = fc
  .record({
    fields: fc.record<Record<string, unknown>>(common, { requiredKeys: [] }),
    family,
    nulls: fc.subarray(KEYS, { maxLength: 5 }),
    raw: fc.dictionary(fc.constantFrom(...COMMON_KEYS), untypable, { maxKeys: 3 }),
    unknown: fc.array(fc.tuple(unknownKey, valueText), { maxLength: 4 }),
    shuffle: fc.option(fc.infiniteStream(fc.nat())),
  })
  .map(({ fields, family, nulls, raw, unknown, shuffle }) => {
    const set = new Set([...Object.keys(fields), ...Object.keys(family?.value ?? {})].map(snake));
    const rawKeys = Object.keys(raw).filter((key) => !set.has(key));
    const nullKeys = nulls.filter((key) => !set.has(key) && !rawKeys.includes(key));
    const strange = unknown.filter(([key]) => !KEYS.includes(String(JSON.parse(`"${key}"`))));
    const standard = [
      ...KEYS.filter((key) => set.has(key) || rawKeys.includes(key) || nullKeys.includes(key)),
      ...strange.map(([key]) => key),
    ];
    let order = standard;
    if (shuffle !== null) {
      // Equal keys keep their order, since only the order of keys is recorded.
      const ranks = new Map(standard.map((key) => [key, shuffle.next().value]));
      order = standard.toSorted((a, b) => Number(ranks.get(a)) - Number(ranks.get(b)));
    }
    const place = (key: string): number => order.indexOf(key);
    const extra = [...rawKeys.map((key) => [key, raw[key] ?? ''] as const), ...strange]
      .map(([key, json]) => ({ key, json }))
      .toSorted((a, b) => place(a.key) - place(b.key));
    return create(KvTransferParamsSchema, {
      ...(fields as object),
      family: (family ?? { case: undefined }) as KvTransferParams['family'],
      nullMembers: nullKeys.toSorted((a, b) => place(a) - place(b)),
      extra,
      memberOrder: order.every((key, i) => key === standard[i]) ? [] : order,
    });
  });

const keyTexts = [...KEYS, 'remote\\u005fport', 'foo', 'x.y', 'é'];
const likelyValue = fc.oneof(
  { weight: 2, arbitrary: valueText },
  { weight: 2, arbitrary: numberText },
  { weight: 1, arbitrary: stringText },
  {
    weight: 4,
    arbitrary: fc.constantFrom(
      'null',
      'true',
      'false',
      '0',
      '1',
      '1519.551656931',
      '1519.0',
      '"pull"',
      '"5600"',
      '[]',
      '[[]]',
      '[[1,2],[3]]',
      '[ [ 1 , 2 ] ]',
      '[1,2,3]',
      '[[1]]',
      '[1,[2]]',
      '[["1"]]',
      '["a","b"]',
      '{"kv_request_id":"k"}',
      '{ "kv_request_id" : "k" , "remote_host" : "h" }',
      '{"remote_host":"h","kv_request_id":"k"}',
      '{}',
      '{"req_id":"17","receiver_host":"h","receiver_init_port":[7300],"receiver_alloc_port":[7400]}',
      '{"req_id":"17","receiver_host":"h","receiver_init_port":[7300],"more":1}',
      '{"kv_request_id":null}',
    ),
  },
);

// ---- tests ------------------------------------------------------------------------------------------------------

describe('the codec', () => {
  test('a handle is typed in full, in its own order', () => {
    const m = decode(HANDLE);
    expect(isTyped(m)).toBe(true);
    expect(m).toMatchObject({
      doRemotePrefill: true,
      doRemoteDecode: false,
      remoteBlockIds: { groups: [{ ids: [1, 2, 3] }], flat: [] },
      remoteEngineId: 'eng-p',
      remotePort: 5600,
      remoteNumTokens: 40,
      remoteRegistrationGeneration: 0,
      nullMembers: ['remote_blocks_expiry_time'],
      transferMode: 'pull',
      family: { case: undefined },
    });
    expect(encode(m)).toBe(HANDLE);
  });

  test('absent, null and 0 are three things', () => {
    const [absent, nothing, zero] = ['{}', '{"remote_num_tokens":null}', '{"remote_num_tokens":0}'].map(decode);
    expect(absent && [absent.remoteNumTokens, absent.nullMembers]).toEqual([undefined, []]);
    expect(nothing && [nothing.remoteNumTokens, nothing.nullMembers]).toEqual([undefined, ['remote_num_tokens']]);
    expect(zero && [zero.remoteNumTokens, zero.nullMembers]).toEqual([0, []]);
  });

  test.each([
    '{"remote_port":"5600"}',
    '{"remote_port":56e2}',
    '{"remote_port":5600.0}',
    '{"remote_port":-0}',
    '{"remote_port":-1}',
    '{"remote_port":4294967296}',
    '{"remote_num_tokens":18446744073709551617}',
    '{"remote_blocks_expiry_time":1519.0}',
    '{"remote_blocks_expiry_time":1e-05}',
    '{"remote_blocks_expiry_time":-0}',
    '{"remote_host":"caf\\u00e9"}',
    '{"remote_host":"\\ud800"}',
    '{"remote_host":"a\\/b"}',
    '{"remote_host":7}',
    '{"do_remote_decode":1}',
    '{"do_remote_decode":"true"}',
    '{"remote_block_ids":[1,[2]]}',
    '{"remote_block_ids":[[1],2]}',
    '{"remote_block_ids":[[1.0]]}',
    '{"remote_block_ids":[[4294967296]]}',
    '{"remote_block_ids":[[[1]]]}',
    '{"remote_block_ids":{"0":[1]}}',
    '{"prompt_token_ids":[1,-2]}',
    '{"remote_handshake_port":"6301"}',
    '{"remote_hosts":["a",1]}',
    '{"disagg_spec":{"receiver_host":"h","req_id":"1"}}',
    '{"disagg_spec":{"req_id":"1","extra":2}}',
    '{"disagg_spec":{"req_id":"1","req_id":"1"}}',
    '{"disagg_spec":{"req_id":null}}',
    '{"disagg_spec":[]}',
    '{"remote_decoder":"x"}',
    '{"remote\\u005fport":5600}',
    '{"unknown":[1, 2.50,{"a":null}]}',
  ])('%s stays raw text', (json) => {
    const m = decode(json);
    expect(m.extra.length).toBe(1);
    expect(encode(m)).toBe(json);
  });

  test.each([
    '{"remote_block_ids":[]}',
    '{"remote_block_ids":[[]]}',
    '{"remote_block_ids":[[],[1]]}',
    '{"remote_block_ids":[1,2,3]}',
    '{"remote_blocks_expiry_time":4080.046870064}',
    '{"remote_host":""}',
    '{"remote_host":"é\\n\\u0001\\"😀"}',
    '{"prompt_token_ids":[]}',
    '{"transfer_id":"xfer-1","remote_bootstrap_addr":"http://10.0.0.1:8998"}',
    '{"remote_handshake_port":6301,"remote_notify_port":61005,"remote_dp_rank":3,"remote_dp_rank_override":true,"remote_hosts":["a","b"]}',
    '{"ret_first_tok":true,"disagg_spec":{"req_id":"17","receiver_host":"h","receiver_init_port":[7300],"receiver_alloc_port":[7400]}}',
    '{"disagg_spec":{}}',
    '{"first_tok":9707}',
    '{"remote_prefiller":{"kv_request_id":"k1","remote_host":"10.0.0.1","remote_port":5710}}',
    '{"remote_decoder":{"kv_request_id":"k1"},"max_load_tokens":0}',
  ])('%s is typed', (json) => {
    const m = decode(json);
    expect(isTyped(m)).toBe(true);
    expect(encode(m)).toBe(json);
  });

  test('flat and nested block lists are told apart', () => {
    expect(decode('{"remote_block_ids":[1,2]}').remoteBlockIds).toMatchObject({ groups: [], flat: [1, 2] });
    expect(decode('{"remote_block_ids":[[1,2]]}').remoteBlockIds).toMatchObject({
      groups: [{ ids: [1, 2] }],
      flat: [],
    });
  });

  test('of duplicates only the last is typed, however its key is spelled', () => {
    const twice = decode('{"remote_port":1,"tp_size":1,"remote_port":2}');
    expect([twice.remotePort, twice.extra.map((e) => e.json)]).toEqual([2, ['1']]);
    const escapedFirst = decode('{"remote\\u005fport":1,"remote_port":2}');
    expect([escapedFirst.remotePort, escapedFirst.memberOrder]).toEqual([2, []]);
    const escapedLast = decode('{"remote_port":1,"remote\\u005fport":2}');
    expect(escapedLast.remotePort).toBeUndefined();
    expect(memberText(escapedLast, 'remote_port')).toBe('2');
    for (const m of [twice, escapedFirst, escapedLast]) expect(hasDuplicateKeys(m)).toBe(true);
    expect(hasDuplicateKeys(decode('{"a":1,"\\u0061":2}'))).toBe(true);
    expect(hasDuplicateKeys(decode('{"tp_size":1,"tp_size":null}'))).toBe(true);
    expect(hasDuplicateKeys(decode(HANDLE))).toBe(false);
  });

  test('keys of a second family stay raw', () => {
    const m = decode('{"first_tok":1,"remote_dp_rank":2}');
    expect(m.family).toMatchObject({ case: 'lmcache', value: { firstTok: 1 } });
    expect(m.extra).toMatchObject([{ key: 'remote_dp_rank', json: '2' }]);
  });

  test('anything but one JSON object in UTF-8 is undefined', () => {
    for (const json of ['', 'null', '[]', '"{}"', '{', '{"a":1}x', '{"a":NaN}']) {
      expect(decodeKvTransferParams(utf8(json))).toBeUndefined();
    }
    expect(decodeKvTransferParams(new Uint8Array([...utf8('{"a":"'), 0xff, ...utf8('"}')]))).toBeUndefined();
  });

  test('encode gives the JSON text back, white space between tokens apart', () => {
    fc.assert(
      fc.property(objectText(keyTexts, likelyValue), (json) => {
        const m = decode(json);
        expect(withoutSpace(encode(m))).toBe(withoutSpace(json));
        expect(
          equals(KvTransferParamsSchema, fromBinary(KvTransferParamsSchema, toBinary(KvTransferParamsSchema, m)), m),
        ).toBe(true);
        expect(JSON.parse(encode(m))).toEqual(JSON.parse(json));
        for (const [key, value] of Object.entries(JSON.parse(json) as object)) {
          expect(JSON.parse(memberText(m, key) ?? 'false')).toEqual(value);
        }
      }),
      { numRuns: 800 },
    );
  });

  test('a canonical message comes back from its JSON, its binary form and its proto JSON', () => {
    fc.assert(
      fc.property(canonical, (m) => {
        const back = decode(encode(m));
        if (!equals(KvTransferParamsSchema, back, m)) expect(back).toEqual(m);
        const binary = fromBinary(KvTransferParamsSchema, toBinary(KvTransferParamsSchema, m));
        expect(encode(binary)).toBe(encode(m));
        const json = fromJson(KvTransferParamsSchema, toJson(KvTransferParamsSchema, m));
        expect(encode(json)).toBe(encode(m));
      }),
      { numRuns: 200 },
    );
  });

  test('a message edited by hand keeps its order; new members come last, removed ones go', () => {
    const m = decode('{"zeta":1,"remote_num_tokens":40,"do_remote_decode":true}');
    m.remoteNumTokens = 32;
    m.remotePort = 1;
    m.doRemoteDecode = undefined;
    expect(encode(m)).toBe('{"zeta":1,"remote_num_tokens":32,"remote_port":1}');
    const made = create(KvTransferParamsSchema, { remotePort: 1, nullMembers: ['remote_port', 'tp_size', 'o"dd'] });
    expect(encode(made)).toBe('{"remote_port":1,"tp_size":null,"o\\"dd":null}');
  });

  test.each([
    ['a', '1,"do_remote_decode":true'],
    ['a', '1}'],
    ['a', ''],
    ['a', 'NaN'],
    ['a":1,"b', '2'],
    ['a":{"b', '1}'],
    ['a\\', '1'],
    ['a\n', '1'],
  ])('refuses to write the foreign member %j: %j', (key, json) => {
    const m = create(KvTransferParamsSchema, { extra: [{ key, json }] });
    expect(hasValidMembers(m)).toBe(false);
    expect(() => encodeKvTransferParams(m)).toThrow(TypeError);
  });

  test('refuses to write an expiry time that JSON cannot hold', () => {
    expect(hasValidMembers(create(KvTransferParamsSchema, { remoteBlocksExpiryTime: Infinity }))).toBe(false);
  });
});

describe('readers', () => {
  test('block ids, tokens, port and strings', () => {
    const m = decode(HANDLE);
    expect(blockIds(m)).toEqual([[1, 2, 3]]);
    expect(numTokens(m)).toBe(40);
    expect(remotePort(m)).toBe(5600);
    expect(stringMember(m, 'remote_engine_id')).toBe('eng-p');
    expect(stringMember(m, 'remote_blocks_expiry_time')).toBeUndefined();
    expect(blockIds(decode('{"remote_block_ids":[1]}'))).toBeUndefined();
    expect(blockIds(decode('{"remote_block_ids":[]}'))).toEqual([]);
    expect(blockIds(decode('{}'))).toBeUndefined();
    expect(numTokens(decode('{"remote_num_tokens":"40"}'))).toBeUndefined();
    expect(stringMember(decode('{"remote_host":"caf\\u00e9"}'), 'remote_host')).toBe('café');
    expect(memberText(decode('{"x":1,"x":[2]}'), 'x')).toBe('[2]');
    expect(memberText(decode('{}'), 'x')).toBeUndefined();
  });

  test.each<[string, number | undefined]>([
    ['5600', 5600],
    ['"5600"', 5600],
    ['1', 1],
    ['65535', 65535],
    ['65536', undefined],
    ['0', undefined],
    ['"0"', undefined],
    ['"05600"', undefined],
    ['" 5600"', undefined],
    ['"5600a"', undefined],
    ['5600.0', undefined],
    ['null', undefined],
    ['[5600]', undefined],
  ])('port %s', (json, expected) => {
    expect(remotePort(decode(`{"remote_port":${json}}`))).toBe(expected);
  });
});
