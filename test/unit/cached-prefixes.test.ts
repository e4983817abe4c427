import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { EngineInfoSchema, IncarnationSchema } from '../../gen/baton/v1/instance_pb.ts';
import { buildChain, promptOfIds } from '../../src/core/chain.ts';
import { CachedPrefixes } from '../../src/services/cached-prefixes.ts';
import { sha256 } from '../../src/services/sha256.ts';
import { prefillOf } from '../support/plan-instances.ts';

const SEED = { model: 'm', adapter: '', cacheSalt: '' };
const ids = (length: number, from = 0) => Array.from({ length }, (_, i) => from + i);
const digests = (tokens: readonly number[]) => buildChain(tokens, SEED, sha256).digests;
const prompt = (tokens: readonly number[], seed = SEED) => promptOfIds(tokens, seed, sha256);
const life = (generation: number) => ({ incarnation: create(IncarnationSchema, { generation }) });
const P = prefillOf('p', life(1));

test('holds whole blocks of what was noted, from the beginning on', () => {
  const cached = new CachedPrefixes();
  expect(cached.held(P, prompt(ids(300)))).toBe(0);
  cached.note(P, digests(ids(300)), 200);
  expect(cached.held(P, prompt(ids(300)))).toBe(192);
  expect(cached.held(P, prompt(ids(100)))).toBe(64);
  expect(cached.held(P, prompt([...ids(70), ...ids(200, 9000)]))).toBe(64);
  expect(cached.held(P, prompt(ids(300, 1)))).toBe(0);
  expect(cached.held(P, prompt(ids(300), { ...SEED, cacheSalt: 's' }))).toBe(0);
  expect(cached.held(prefillOf('other', life(1)), prompt(ids(300)))).toBe(0);
});

test('another life has nothing of the one before', () => {
  const cached = new CachedPrefixes();
  cached.note(P, digests(ids(300)), 300);
  expect(cached.held(prefillOf('p', life(2)), prompt(ids(300)))).toBe(0);
});

test('as much is remembered as fits into the engine, and of a long prompt its beginning', () => {
  const cached = new CachedPrefixes();
  const small = { ...P, engine: create(EngineInfoSchema, { blockSize: 16, numGpuBlocks: 40 }) };
  cached.note(small, digests(ids(640)), 640);
  expect(cached.held(small, prompt(ids(640)))).toBe(640);
  cached.note(small, digests(ids(320, 5000)), 320);
  expect(cached.held(small, prompt(ids(320, 5000)))).toBe(320);
  expect(cached.held(small, prompt(ids(640)))).toBe(320);
});
