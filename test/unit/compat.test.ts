import { create } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { EngineInfoSchema, type ModelCard, ModelCardSchema } from '../../gen/baton/v1/instance_pb.ts';
import { adapterRoot, compatGroup, keepsWeights } from '../../src/core/compat.ts';
import { decodeOf, prefillOf } from '../support/plan-instances.ts';

const ENGINE = { kind: 'vllm', version: '0.33.0', blockSize: 16, templateFingerprint: 'f' };
const card = (id: string, root: string, parent = ''): ModelCard => create(ModelCardSchema, { id, root, parent });
const of = (engine: Partial<typeof ENGINE> = {}, models = [card('m', 'weights')]) =>
  prefillOf('p', { engine: create(EngineInfoSchema, { ...ENGINE, ...engine }), models });

describe('compatGroup', () => {
  test('equal engines are in one group, whatever their role and names', () => {
    const other = decodeOf('d', { engine: create(EngineInfoSchema, ENGINE), models: [card('other-name', 'weights')] });
    expect(compatGroup(other)).toBe(compatGroup(of()));
    expect(compatGroup(of())).not.toBe('');
  });

  test.each([
    ['kind', of({ kind: 'sglang' })],
    ['version', of({ version: '0.32.0' })],
    ['block size', of({ blockSize: 32 })],
    ['template', of({ templateFingerprint: 'g' })],
    ['weights', of({}, [card('m', 'others')])],
    ['connector', prefillOf('p', { ...of(), connector: 'none' })],
  ])('another %s is another group', (_, instance) => {
    expect(compatGroup(instance)).not.toBe(compatGroup(of()));
    expect(compatGroup(instance)).not.toBe('');
  });

  test('adapters and the order of models make no difference', () => {
    const models = [card('a', 'one'), card('b', 'two')];
    const turned = [card('l', 'adapter', 'a'), card('b', 'two'), card('a', 'one')];
    expect(compatGroup(of({}, turned))).toBe(compatGroup(of({}, models)));
  });

  test.each([
    ['engine', prefillOf('p')],
    ['version', of({ version: '' })],
    ['block size', of({ blockSize: 0 })],
    ['template', of({ templateFingerprint: '' })],
  ])('without a known %s there is no group', (_, instance) => {
    expect(compatGroup(instance)).toBe('');
  });
});

describe('adapterRoot', () => {
  const instance = of({}, [card('m', 'weights'), card('l', 'adapters/l', 'm'), card('k', '', 'm')]);

  test.each([
    ['m', ''],
    ['l', 'adapters/l'],
    ['k', 'k'],
    ['unknown', ''],
  ])('of %s is "%s"', (model, root) => {
    expect(adapterRoot(instance, model)).toBe(root);
  });
});

describe('keepsWeights', () => {
  test.each([
    ['a model', '', '', true],
    ['an adapter that stays', 'adapters/l', 'fixed', true],
    ['an adapter that can be replaced', 'adapters/l', 'reloadable', false],
    ['an adapter of an engine that does not tell', 'adapters/l', '', false],
  ])('%s', (_, adapter, adapters, keeps) => {
    const instance = prefillOf('p', { engine: create(EngineInfoSchema, { ...ENGINE, adapters }) });
    expect(keepsWeights(instance, adapter)).toBe(keeps);
  });
});
