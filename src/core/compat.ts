import type { Instance } from '../../gen/baton/v1/instance_pb.ts';

/**
 * Names the instances that may exchange KV with this one for a model: equal names may. Empty while something it depends
 * on is unknown; then the instance takes no part in reuse. Data types, parallel sizes and transfer mode are compared by
 * the engines' own handshake, which ends in a load failure and never in wrong KV.
 */
export function compatGroup(instance: Instance): string {
  const { engine, connector, models } = instance;
  if (engine === undefined || engine.version === '' || engine.blockSize === 0) return '';
  if (engine.templateFingerprint === '') return '';
  const roots = models.filter(({ parent }) => parent === '').map(({ root }) => root);
  return JSON.stringify([
    engine.kind,
    engine.version,
    connector,
    engine.blockSize,
    engine.templateFingerprint,
    roots.toSorted(),
  ]);
}

/** Root of the adapter that `model` names on this instance; empty for a base model. */
export function adapterRoot(instance: Instance, model: string): string {
  const card = instance.models.find(({ id }) => id === model);
  return card === undefined || card.parent === '' ? '' : card.root || card.id;
}
