import { readdirSync, readFileSync } from 'node:fs';
import { fromBinary, toBinary } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { type KvTransferParams, KvTransferParamsSchema } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { decodeKvTransferParams, encodeKvTransferParams } from '../../src/core/kv-transfer.ts';
import { textOf, utf8, withoutSpace } from './json-text.ts';

const SAMPLES = new URL('../fixtures/engine-samples/', import.meta.url);

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

describe('recorded handles', () => {
  const found: { readonly name: string; readonly json: string }[] = [];
  for (const name of readdirSync(SAMPLES)) {
    const content = readFileSync(new URL(name, SAMPLES), 'utf8');
    const texts = name.endsWith('.sse')
      ? content.split('\n').flatMap((line) => (line.startsWith('data: {') ? [line.slice(6)] : []))
      : [withoutSpace(content)];
    for (const text of texts) {
      // The raw text, not a parse of it: a float such as 4080.0 has to survive as written.
      for (const match of text.matchAll(/"kv_transfer_params":(\{(?:[^{}]|\{[^{}]*\})*\})/g)) {
        found.push({ name, json: match[1] ?? '' });
      }
    }
  }

  test('there are many', () => {
    expect(found.length).toBeGreaterThan(150);
  });

  test('each comes back byte for byte, through the binary form too', () => {
    for (const { name, json } of found) {
      const m = decode(json);
      expect(encode(m), name).toBe(json);
      expect(encode(fromBinary(KvTransferParamsSchema, toBinary(KvTransferParamsSchema, m))), name).toBe(json);
    }
  });

  test('what engines answer is typed in full, without a recorded order', () => {
    const answers = found
      .filter((f) => /^v03[23]-[PD]-chat-(?:for|nonstream|stream)/.test(f.name))
      .map((f) => decode(f.json));
    expect(answers.filter((m) => m.remoteEngineId !== undefined).length).toBeGreaterThan(10);
    for (const m of answers.filter((answer) => answer.remoteEngineId !== undefined)) expect(isTyped(m)).toBe(true);
  });
});
