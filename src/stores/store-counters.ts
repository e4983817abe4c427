import type { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { AgingMap } from './aging-map.ts';
import type { StoreStats } from './store.ts';

type Counted = Pick<StoreStats, 'puts' | 'takes' | 'misses' | 'evictions' | 'expirations'>;

interface Counts extends Counted {
  puts: number;
  takes: number;
  evictions: number;
  expirations: number;
  readonly misses: Map<MissReason, number>;
}

/** Tenants whose counts are kept; a tenant is whatever a caller presents, so their number has no bound of its own. */
const MAX_TENANTS = 10_000;

/** What happened since the store was opened, in all and by tenant. A tenant's counts start again when it is forgotten. */
export class StoreCounters {
  readonly #all = noCounts();
  readonly #tenants = new AgingMap<string, Counts>({ lifetimeMs: Number.POSITIVE_INFINITY, maxCount: MAX_TENANTS });

  of(tenant: string | undefined): Counted {
    const counts = tenant === undefined ? this.#all : (this.#tenants.get(tenant, 0) ?? noCounts());
    return { ...counts, misses: new Map(counts.misses) };
  }

  put(tenant: string): void {
    for (const counts of this.#both(tenant)) counts.puts += 1;
  }

  taken(tenant: string): void {
    for (const counts of this.#both(tenant)) counts.takes += 1;
  }

  missed(tenant: string, reason: MissReason): void {
    for (const counts of this.#both(tenant)) counts.misses.set(reason, (counts.misses.get(reason) ?? 0) + 1);
  }

  evicted(tenant: string): void {
    for (const counts of this.#both(tenant)) counts.evictions += 1;
  }

  expired(tenant: string): void {
    for (const counts of this.#both(tenant)) counts.expirations += 1;
  }

  #both(tenant: string): readonly Counts[] {
    let counts = this.#tenants.get(tenant, 0);
    if (counts === undefined) {
      counts = noCounts();
      this.#tenants.set(tenant, counts, 0);
    }
    return [this.#all, counts];
  }
}

function noCounts(): Counts {
  return { puts: 0, takes: 0, evictions: 0, expirations: 0, misses: new Map() };
}
