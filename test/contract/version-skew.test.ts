import { create, fromBinary, toBinary } from '@bufbuild/protobuf';
import { BinaryWriter, WireType } from '@bufbuild/protobuf/wire';
import { afterEach, describe, expect, test } from 'vitest';
import { InstanceSchema, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import {
  EntryKeySchema,
  GetEntryRequestSchema,
  GetEntryResponseSchema,
  MissReason,
  TakeEntryResponseSchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { LegEnding, LegReportSchema, PlanMode, ReportOutcomeRequestSchema } from '../../gen/baton/v1/router_pb.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { startRpcListener } from '../../src/rpc/listener.ts';
import type { RpcServices } from '../../src/rpc/routes.ts';
import { EVERYTHING } from '../../src/services/kv-cache-store.ts';
import { relayRegistry } from '../../src/services/registry-relay.ts';
import { BINDINGS } from '../support/rpc-bindings.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

/** Fields that no contract of today has, of each wire type. */
const LATER_FIELDS = new BinaryWriter()
  .tag(1901, WireType.Varint)
  .uint64(2n ** 63n)
  .tag(1902, WireType.Bit64)
  .fixed64(7n)
  .tag(1903, WireType.LengthDelimited)
  .string('from a later release')
  .tag(1904, WireType.Bit32)
  .fixed32(7)
  .finish();

/** An enum value of a later release, in the field of this number. */
const laterEnum = (field: number) => new BinaryWriter().tag(field, WireType.Varint).int32(99).finish();

const nested = (field: number, ...parts: readonly Uint8Array[]) =>
  new BinaryWriter().tag(field, WireType.LengthDelimited).bytes(Buffer.concat(parts)).finish();

async function serve(services: RpcServices): Promise<string> {
  const listener = stack.use(
    await startRpcListener({
      host: '127.0.0.1',
      port: 0,
      services,
      callerOf: () => EVERYTHING,
      onFault: () => undefined,
    }),
  );
  return `http://127.0.0.1:${listener.port}`;
}

function send(url: string, method: string, type: string, body: Uint8Array | string): Promise<Response> {
  return fetch(`${url}/baton.v1.${method}`, {
    method: 'POST',
    headers: { 'content-type': type },
    body: Buffer.from(body),
  });
}

const KEY = { tenant: 't', model: 'm', conversationId: 'c' };

describe('what a later caller sends', () => {
  test('unknown fields, on top and within: the rest is read', async () => {
    const asked: unknown[] = [];
    const url = await serve({
      kvCacheStore: {
        getEntry: ({ selector }) => {
          asked.push(selector.case === 'key' ? selector.value.conversationId : selector);
          return {};
        },
      },
    });
    const binary = Buffer.concat([
      nested(1, toBinary(EntryKeySchema, create(EntryKeySchema, KEY)), LATER_FIELDS),
      LATER_FIELDS,
    ]);
    expect(fromBinary(GetEntryRequestSchema, binary).selector.case).toBe('key');
    expect((await send(url, 'KVCacheStore/GetEntry', 'application/proto', binary)).status).toBe(200);
    const json = JSON.stringify({ key: { ...KEY, later: { deep: [1] } }, another: 'x' });
    expect((await send(url, 'KVCacheStore/GetEntry', 'application/json', json)).status).toBe(200);
    expect(asked).toEqual(['c', 'c']);
  });

  test('unknown enum values: the number in binary, none in JSON, and no refusal', async () => {
    const endings: unknown[] = [];
    const url = await serve({
      router: {
        reportOutcome: ({ planId, legs }) => {
          endings.push([planId, ...legs.map(({ ending }) => ending)]);
          return {};
        },
      },
    });
    const field = LegReportSchema.field.ending.number;
    const legs = ReportOutcomeRequestSchema.field.legs.number;
    const report = create(ReportOutcomeRequestSchema, { planId: 'p' });
    const binary = Buffer.concat([toBinary(ReportOutcomeRequestSchema, report), nested(legs, laterEnum(field))]);
    expect((await send(url, 'Router/ReportOutcome', 'application/proto', binary)).status).toBe(200);
    for (const ending of [99, 'LEG_ENDING_LATER']) {
      const json = JSON.stringify({ planId: 'p', legs: [{ ending }] });
      expect((await send(url, 'Router/ReportOutcome', 'application/json', json)).status).toBe(200);
    }
    expect(endings).toEqual([
      ['p', 99],
      ['p', 99],
      ['p', LegEnding.UNSPECIFIED],
    ]);
  });
});

describe.each(BINDINGS.slice(0, 5))('what a later server answers: $name', ({ open }) => {
  test('unknown fields and enum values do not disturb the known ones', async () => {
    const miss = fromBinary(
      TakeEntryResponseSchema,
      Buffer.concat([nested(TakeEntryResponseSchema.field.miss.number, laterEnum(1), LATER_FIELDS), LATER_FIELDS]),
    );
    const instance = fromBinary(InstanceSchema, LATER_FIELDS);
    await using bound = await open({
      kvCacheStore: {
        takeEntry: () => miss,
        // A result that only a later release knows.
        getEntry: () => fromBinary(GetEntryResponseSchema, LATER_FIELDS),
      },
      poolRegistry: {
        listInstances: () => ({ instances: [{ ...instance, id: 'a', state: InstanceState.READY }] }),
      },
      router: { planRoute: () => ({ result: { case: 'plan', value: { planId: 'p', mode: PlanMode.AGGREGATED } } }) },
    });
    const { result } = await bound.kvCacheStore.takeEntry({ key: KEY });
    expect([result.case, result.case === 'miss' ? result.value.reason : undefined]).toEqual(['miss', 99]);
    expect(await bound.kvCacheStore.getEntry({ selector: { case: 'key', value: KEY } })).toMatchObject({ entries: [] });
    const { instances } = await bound.poolRegistry.listInstances({});
    expect(instances).toMatchObject([{ id: 'a', state: InstanceState.READY }]);
  });
});

test('JSON of a later server is read as well', async () => {
  const url = await serve({
    kvCacheStore: { takeEntry: () => ({ result: { case: 'miss', value: { reason: MissReason.TAKEN } } }) },
  });
  const reply = await send(url, 'KVCacheStore/TakeEntry', 'application/json', '{"later": 1}');
  expect(await reply.json()).toEqual({ miss: { reason: 'MISS_REASON_TAKEN' } });
});

test('a relay hands on what it does not know', async () => {
  const later = fromBinary(InstanceSchema, LATER_FIELDS);
  const registry = await serve({ poolRegistry: { getInstance: () => ({ instance: { ...later, id: 'a' } }) } });
  const behind = stack.use(connectRemote({ url: registry }));
  const relay = await serve({ poolRegistry: relayRegistry(behind.poolRegistry) });
  const client = stack.use(connectRemote({ url: relay }));
  const { instance } = await client.poolRegistry.getInstance({ instanceId: 'a' });
  expect(instance?.$unknown?.map(({ no }) => no)).toEqual([1901, 1902, 1903, 1904]);
});
