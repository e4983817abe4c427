import { createHash } from 'node:crypto';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { create, type DescMessage, type DescMethod, toBinary } from '@bufbuild/protobuf';
import { expect } from 'vitest';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { startStubbed } from '../support/stub-engine.ts';
import { drawJson, mutate } from './fuzz-bytes.ts';
import { runFuzz, sendAnyhow } from './fuzz-run.ts';
import type { Draw } from './property-requests.ts';

const METHODS = [Router, PoolRegistry, KVCacheStore].flatMap(({ methods }): readonly DescMethod[] => methods);

function drawMethod(draw: Draw): DescMethod {
  const method = METHODS[draw.int(0, METHODS.length - 1)];
  if (method === undefined) throw new Error('there is no method');
  return method;
}

/** A message with texts, numbers and messages in some of its fields, as bytes. */
function drawMessage(draw: Draw, schema: DescMessage, depth = 0): Uint8Array {
  const parts: Uint8Array[] = [toBinary(schema, create(schema))];
  for (const field of schema.fields) {
    if (!draw.chance(0.6)) continue;
    const isMessage = field.message !== undefined && field.fieldKind !== 'map';
    if (isMessage && depth < 4 && field.message !== undefined) {
      parts.push(lengthDelimited(field.number, drawMessage(draw, field.message, depth + 1)));
    } else if (draw.chance(0.7)) {
      parts.push(lengthDelimited(field.number, Buffer.from(draw.pick(['', 'a', 'x'.repeat(700), '\0', '9', 'é']))));
    } else {
      parts.push(Buffer.concat([varint(field.number * 8), varint(draw.pick([0, 1, 7, 2 ** 31, 2 ** 53]))]));
    }
  }
  return Buffer.concat(parts);
}

function varint(value: number): Buffer {
  const bytes: number[] = [];
  let rest = value;
  for (; rest >= 128; rest = Math.floor(rest / 128)) bytes.push((rest % 128) + 128);
  return Buffer.from([...bytes, rest]);
}

function lengthDelimited(number: number, bytes: Uint8Array): Buffer {
  return Buffer.concat([varint(number * 8 + 2), varint(bytes.byteLength), bytes]);
}

const TYPES = [
  'application/proto',
  'application/json',
  'application/connect+proto',
  'application/grpc',
  'application/grpc-web+proto',
  'text/plain',
] as const;

interface Call {
  readonly path: string;
  readonly type: string;
  readonly body: Buffer;
}

function drawCall(draw: Draw): Call {
  const method = drawMethod(draw);
  const type = draw.pick(TYPES);
  const message =
    type === 'application/json' ? Buffer.from(drawJson(draw)) : Buffer.from(drawMessage(draw, method.input));
  const sent = draw.chance(0.4) ? mutate(draw, message) : message;
  const isFramed = /connect\+|grpc/.test(type);
  const frame = Buffer.from([draw.chance(0.1) ? draw.int(0, 255) : 0, 0, 0, sent.length >> 8, sent.length & 255]);
  const path = `/${method.parent.typeName}/${method.name}`;
  return { path, type, body: isFramed ? Buffer.concat([frame, sent]) : sent };
}

const TOKEN = 'fuzz-token';

function http1(draw: Draw): Buffer {
  const { path, type, body } = drawCall(draw);
  const isZipped = draw.chance(0.1);
  const sent = isZipped ? gzipSync(body) : body;
  const more = [
    draw.chance(0.9) ? `authorization: Bearer ${TOKEN}\r\n` : '',
    isZipped ? 'content-encoding: gzip\r\n' : '',
    draw.chance(0.2) ? `connect-timeout-ms: ${draw.pick(['1', '0', '-1', 'x', '99999999999'])}\r\n` : '',
  ].join('');
  const head = `POST ${path} HTTP/1.1\r\nhost: x\r\ncontent-type: ${type}\r\n${more}content-length: ${sent.length}\r\n\r\n`;
  return Buffer.concat([Buffer.from(head), sent]);
}

const PREFACE = Buffer.from('PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n');
const [DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION] = [0, 1, 3, 4, 6, 8, 9] as const;
const [END_STREAM, END_HEADERS] = [1, 4] as const;

function frame(type: number, flags: number, stream: number, payload: Uint8Array = Buffer.alloc(0)): Buffer {
  const head = Buffer.alloc(9);
  head.writeUIntBE(payload.byteLength, 0, 3);
  head[3] = type;
  head[4] = flags;
  head.writeUInt32BE(stream, 5);
  return Buffer.concat([head, payload]);
}

/** Headers in HPACK's plainest form: no table, no Huffman code. */
function headerBlock(headers: readonly (readonly [string, string])[]): Buffer {
  const text = (value: string) => Buffer.concat([Buffer.from([value.length]), Buffer.from(value, 'latin1')]);
  return Buffer.concat(headers.map(([name, value]) => Buffer.concat([Buffer.from([0]), text(name), text(value)])));
}

function callFrames(draw: Draw, stream: number): readonly Buffer[] {
  const { path, type, body } = drawCall(draw);
  const headers = headerBlock([
    [':method', draw.pick(['POST', 'POST', 'POST', 'GET', 'CONNECT'])],
    [':path', path],
    [':scheme', 'http'],
    [':authority', draw.pick(['x', 'x y', ''])],
    ['content-type', type],
    ['te', 'trailers'],
    ['authorization', `Bearer ${TOKEN}`],
    ...(draw.chance(0.1) ? [['connection', 'close'] as const] : []),
  ]);
  const at = draw.int(0, headers.length);
  const begin = draw.chance(0.2)
    ? [
        frame(HEADERS, 0, stream, headers.subarray(0, at)),
        frame(CONTINUATION, END_HEADERS, stream, headers.subarray(at)),
      ]
    : [frame(HEADERS, END_HEADERS, stream, headers)];
  return [...begin, frame(DATA, draw.chance(0.9) ? END_STREAM : 0, stream, body)];
}

/** A flood of frames of one kind. */
function flood(draw: Draw): Buffer {
  const one = draw.pick<(i: number) => Buffer>([
    () => frame(PING, 0, 0, Buffer.alloc(8)),
    () => frame(SETTINGS, 0, 0),
    (i) => Buffer.concat([...callFrames(draw, 2 * i + 1), frame(RST_STREAM, 0, 2 * i + 1, Buffer.alloc(4))]),
    (i) =>
      i === 0 ? frame(HEADERS, 0, 1, headerBlock([['a', 'b']])) : frame(CONTINUATION, 0, 1, headerBlock([['a', 'b']])),
    () => frame(WINDOW_UPDATE, 0, 0, Buffer.from([0x7f, 0xff, 0xff, 0xff])),
    (i) => frame(DATA, 0, 2 * i + 1, Buffer.alloc(10)),
  ]);
  return Buffer.concat(Array.from({ length: 300 }, (_, i) => one(i)));
}

function http2(draw: Draw): Buffer {
  const frames: Buffer[] = [PREFACE, frame(SETTINGS, 0, 0)];
  for (let left = draw.int(0, 6), stream = 1; left > 0; left--) {
    const isCall = draw.chance(0.6);
    if (isCall) frames.push(...callFrames(draw, stream));
    else if (draw.chance(0.15)) frames.push(flood(draw));
    else
      frames.push(
        frame(draw.int(0, 12), draw.int(0, 255), draw.int(0, 9), Buffer.alloc(draw.int(0, 60), draw.int(0, 255))),
      );
    if (isCall && draw.chance(0.9)) stream += 2;
  }
  return Buffer.concat(frames);
}

/** Codes of Connect that say what the world is like, and not that something broke. */
const OF_THE_WORLD = /"code":"(?:unavailable|deadline_exceeded|unimplemented)"/;

/** Sends calls and frames, right ones and changed ones, to the RPC port of a baton in this process. */
export async function fuzzRpc(seconds: number, seed: number): Promise<number> {
  const folder = mkdtempSync(join(tmpdir(), 'baton-fuzz-'));
  try {
    const file = join(folder, 'tokens.txt');
    // No operator's: what registers instances would make baton speak with any host.
    writeFileSync(file, `fuzz sha256:${createHash('sha256').update(TOKEN).digest('hex')} any-tenant\n`);
    const yaml = 'timeouts: {queue: 100ms}\nstore: {tenant_entries: 100, max_bytes: 4MiB}\n';
    await using stubbed = await startStubbed({ yaml, flags: { 'rpc-tokens-file': file } });
    const port = Number(new URL(stubbed.rpcUrl).port);
    const statuses = new Map<number, number>();
    let sessions = 0;
    const sent = await runFuzz(seconds, seed, {
      async once(draw) {
        const isHttp2 = draw.chance(0.5);
        const whole = isHttp2 ? http2(draw) : http1(draw);
        const bytes = draw.chance(0.4) ? mutate(draw, whole) : whole;
        const answer = await sendAnyhow(draw, port, bytes);
        if (isHttp2) {
          // Its own settings come first.
          if (answer[3] === SETTINGS) sessions += 1;
          return undefined;
        }
        const text = answer.toString('latin1');
        const status = Number(/^HTTP\/1\.1 (\d{3}) /.exec(text)?.[1] ?? 0);
        statuses.set(status, (statuses.get(status) ?? 0) + 1);
        if (status < 500 || OF_THE_WORLD.test(text)) return undefined;
        return `${text}\n<- ${JSON.stringify(bytes.toString('latin1'))}`;
      },
      async check() {
        using remote = connectRemote({ url: stubbed.rpcUrl, token: TOKEN });
        expect((await remote.kvCacheStore.getStats({})).runId).not.toBe('');
        expect((await remote.poolRegistry.listInstances({})).instances).toHaveLength(2);
        expect(stubbed.log.filter(({ level }) => level === 'error' || level === 'fatal')).toEqual([]);
        stubbed.forgetLog();
      },
    });
    // It went deep enough: right calls, wrong ones, and sessions of HTTP/2.
    for (const status of [200, 400, 401, 415]) expect([...statuses.keys()]).toContain(status);
    expect(sessions).toBeGreaterThan(20);
    return sent;
  } finally {
    rmSync(folder, { recursive: true });
  }
}
