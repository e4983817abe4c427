import type { MessageInitShape } from '@bufbuild/protobuf';
import type { CallOptions, Client } from '@connectrpc/connect';
import type { TestContext } from 'vitest';
import type { Entry, EntryFilterSchema, KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { type KvCacheStoreOptions, KvCacheStoreService } from '../../src/services/kv-cache-store.ts';
import type { StoreCaller } from '../../src/services/kv-store-arguments.ts';
import { STORES } from '../../src/stores/index.ts';
import type { StoreLimits } from '../../src/stores/store.ts';
import { limits, type TestTime } from './kv-store.ts';
import { needsRedis } from './redis.ts';
import { BINDINGS, type Binding } from './rpc-bindings.ts';
import type { Backends } from './store-backends.ts';
import { ownNames, type PutParts, putRequest, type TakeParts, takeRequest } from './store-messages.ts';

/** Who calls beside the caller without options: another tenant, and callers with more rights. */
export type Who = 'other' | 'operator' | 'router' | 'unverified';

/** A store as one test sees it: over the wire alone, with names that no other test uses. */
export interface StoreWorld extends AsyncDisposable {
  readonly client: Client<typeof KVCacheStore>;
  /** Options of a call by somebody else; undefined where there is no such caller. */
  readonly as: (who: Who) => CallOptions | undefined;
  /** Lets time pass in the store. */
  readonly pass: (ms: number) => Promise<void>;
  readonly names: ReturnType<typeof ownNames>;
  readonly putRequest: (rest?: PutParts, tokens?: number[]) => ReturnType<typeof putRequest>;
  readonly takeRequest: (rest?: TakeParts, prompt?: number[]) => ReturnType<typeof takeRequest>;
}

/** Opens the store for one test; what it lacks for the test makes it skip aloud. */
export type OpenWorld = (context: Pick<TestContext, 'skip'>) => Promise<StoreWorld>;

/** Requests for names of their own. */
export function ownRequests(): Pick<StoreWorld, 'names' | 'putRequest' | 'takeRequest'> {
  const names = ownNames();
  return {
    names,
    putRequest: (rest, tokens) => putRequest(names, rest, tokens),
    takeRequest: (rest, prompt) => takeRequest(names, rest, prompt),
  };
}

/** Options of a call that the test cannot do without. */
export function callerFor(context: Pick<TestContext, 'skip'>, world: Pick<StoreWorld, 'as'>, who: Who): CallOptions {
  return world.as(who) ?? context.skip(`nobody here calls as ${who}`);
}

/** The service over one backend, reached through one binding. */
export type StoreCase = Binding & { readonly backend: string };

/** Every backend through every binding. */
export const STORE_CASES: readonly StoreCase[] = Object.keys(STORES).flatMap((backend) =>
  BINDINGS.map((binding) => ({ backend, ...binding })),
);

/** Those with these names, `backend binding` each. */
export function storeCases(...names: readonly string[]): readonly StoreCase[] {
  return STORE_CASES.filter(({ backend, name }) => names.includes(`${backend} ${name}`));
}

const NO_RIGHTS: StoreCaller = { tenant: 't', actsForAnyTenant: false, mayTakeUnverified: false, isOperator: false };
const RIGHTS: Readonly<Record<Who, StoreCaller>> = {
  other: { ...NO_RIGHTS, tenant: 'u' },
  operator: { ...NO_RIGHTS, isOperator: true },
  router: { ...NO_RIGHTS, tenant: 'router', actsForAnyTenant: true },
  unverified: { ...NO_RIGHTS, mayTakeUnverified: true },
};

/** How {@link openLocalWorld} differs from the contract. */
export interface LocalOptions extends Pick<Partial<KvCacheStoreOptions>, 'isEnabled'> {
  readonly limits?: Partial<StoreLimits>;
}

/** An empty store in this process; headers say who calls, as credentials would, and time is the test's own. */
export async function openLocalWorld(
  backends: Backends,
  { backend, open }: StoreCase,
  context: Pick<TestContext, 'skip'>,
  options: LocalOptions = {},
) {
  if (backend === 'valkey') needsRedis(context);
  const { limits: some, ...rest } = options;
  const time: TestTime = { now: 0 };
  const inForce = limits(some);
  const store = await backends.of(backend)({ now: () => time.now, limits: inForce });
  const service = new KvCacheStoreService({
    store,
    limits: inForce,
    callerOf: ({ requestHeader }) => {
      const who = Object.entries(RIGHTS).find(([name]) => name === requestHeader.get('x-who'));
      return who?.[1] ?? NO_RIGHTS;
    },
    ...rest,
  });
  const bound = await open({ kvCacheStore: service });
  const as = (who: Who): CallOptions => ({ headers: { 'x-who': who } });
  return {
    time,
    store,
    service,
    client: bound.kvCacheStore,
    as,
    async pass(ms: number) {
      time.now += ms;
    },
    ...ownRequests(),
    async [Symbol.asyncDispose]() {
      await bound[Symbol.asyncDispose]();
      service[Symbol.dispose]();
    },
  } satisfies StoreWorld & Record<string, unknown>;
}

/** All entries that pass a filter; in a store that is in use pages can be short or empty. */
export async function listed(
  { client }: Pick<StoreWorld, 'client'>,
  filter: MessageInitShape<typeof EntryFilterSchema>,
  options?: CallOptions,
): Promise<readonly Entry[]> {
  const entries: Entry[] = [];
  let pageToken = '';
  do {
    const page = await client.listEntries({ filter, pageSize: 100, pageToken }, options);
    entries.push(...page.entries);
    pageToken = page.nextPageToken;
  } while (pageToken !== '');
  return entries;
}
