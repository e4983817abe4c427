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

/**
 * Whether the KV of a model follows from its name and root on this instance. An adapter may be replaced under both by an
 * engine that allows it at all; what was computed before is then another model's.
 */
export function keepsWeights({ engine }: Instance, adapter: string): boolean {
  return adapter === '' || engine?.adapters === 'fixed';
}

/** Label by which an operator keeps instances apart whatever else they have in common. */
const GROUP_LABEL = 'compat_group';

/** What must be equal between the two instances of a pair, each by its name in reasons; an empty text is not known. */
export type PairTraits = Readonly<Record<(typeof TRAITS)[number], string>>;

const TRAITS = ['group', 'connector', 'engine', 'version', 'block_size', 'template', 'model_root'] as const;

/** The traits of an instance for requests with this model; an empty model is the engine's first. */
export function pairTraits(instance: Instance, model: string): PairTraits {
  const { engine, connector, labels, models } = instance;
  const card = model === '' ? models[0] : models.find(({ id }) => id === model);
  const blockSize = engine?.blockSize ?? 0;
  return {
    group: labels[GROUP_LABEL] ?? '',
    connector,
    engine: engine?.kind ?? '',
    version: engine?.version ?? '',
    block_size: blockSize === 0 ? '' : String(blockSize),
    template: engine?.templateFingerprint ?? '',
    model_root: card?.root ?? '',
  };
}

/** The first trait by which two instances cannot be a pair: both know it, and differ. */
export function pairMismatch(one: PairTraits, other: PairTraits): keyof PairTraits | undefined {
  return TRAITS.find((trait) => one[trait] !== '' && other[trait] !== '' && one[trait] !== other[trait]);
}
