import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { buildPools, type Pools, type Seated } from '../core/pools.ts';
import type { Seats } from './seats.ts';

/** Models for which pools are kept; names come from clients, so there must be an end. */
const MAX_MODELS = 256;

/**
 * The pools of each model, made when a plan first needs them and kept until something changes that the filter looks at:
 * a new load reading is no such thing, and it is what changes most often.
 */
export class PoolCache {
  readonly #snapshot: () => readonly Instance[];
  readonly #seats: Seats;
  readonly #connector: string;
  readonly #shapes = new WeakMap<Instance, string>();
  readonly #byModel = new Map<string, Pools>();
  #seen: readonly Instance[] = [];
  #seated: readonly Seated[] = [];

  constructor(snapshot: () => readonly Instance[], seats: Seats, connector: string) {
    this.#snapshot = snapshot;
    this.#seats = seats;
    this.#connector = connector;
  }

  /** The pools for a model, without the instances that are barred at this moment, by the reason for it. */
  of(model: string, barred: ReadonlyMap<string, string>): Pools {
    this.#refresh();
    if (barred.size > 0) return this.#build(model, barred);
    const known = this.#byModel.get(model);
    if (known !== undefined) return known;
    if (this.#byModel.size >= MAX_MODELS) this.#byModel.clear();
    const pools = this.#build(model, NOBODY);
    this.#byModel.set(model, pools);
    return pools;
  }

  #build(model: string, barred: ReadonlyMap<string, string>): Pools {
    return buildPools(this.#seated, { model, connector: this.#connector, barred });
  }

  #refresh(): void {
    const instances = this.#snapshot();
    const before = this.#seen;
    if (instances === before) return;
    this.#seen = instances;
    let changed = instances.length !== before.length;
    // Once for every reading of every engine: without a pair for each instance, as `entries` would make.
    for (let i = 0; i < instances.length; i += 1) {
      const instance = instances[i];
      const old = before[i];
      if (old === instance || instance === undefined) continue;
      this.#seats.describe(instance);
      changed ||= old === undefined || this.#shapeOf(old) !== this.#shapeOf(instance);
    }
    if (!changed) return;
    this.#seated = instances.flatMap(({ id }) => this.#seats.get(id) ?? []);
    this.#byModel.clear();
    this.#seats.retain(new Set(instances.map(({ id }) => id)));
  }

  /** What the filter looks at, as one text. */
  #shapeOf(instance: Instance): string {
    const known = this.#shapes.get(instance);
    if (known !== undefined) return known;
    const { id, role, state, connector, modelsKnown, models, engine, labels } = instance;
    const cards = models.map((card) => [card.id, card.root]);
    const { kind, version, blockSize, templateFingerprint } = engine ?? {};
    const parts = [
      id,
      role,
      state,
      connector,
      modelsKnown,
      cards,
      kind,
      version,
      blockSize,
      templateFingerprint,
      labels,
    ];
    const shape = JSON.stringify(parts);
    this.#shapes.set(instance, shape);
    return shape;
  }
}

const NOBODY: ReadonlyMap<string, string> = new Map();
