import type { ServiceImpl } from '@connectrpc/connect';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import { type BoundMethod, bindService, type FaultSink } from './bind.ts';

/** The services that a process serves; what is absent answers UNIMPLEMENTED. */
export interface RpcServices {
  readonly router?: Partial<ServiceImpl<typeof Router>>;
  readonly poolRegistry?: Partial<ServiceImpl<typeof PoolRegistry>>;
  readonly kvCacheStore?: Partial<ServiceImpl<typeof KVCacheStore>>;
}

/** What the port can serve, by the names of {@link RpcServices}. */
const SERVICES = { router: Router, poolRegistry: PoolRegistry, kvCacheStore: KVCacheStore } as const;

/** The services of the contracts, whether or not a process serves them. */
export const BATON_SERVICES = Object.values(SERVICES);

/** Full names of what is served. */
export function servedNames(services: RpcServices): readonly string[] {
  return Object.entries(SERVICES).flatMap(([key, { typeName }]) => (Object.hasOwn(services, key) ? [typeName] : []));
}

/** Every method of the contracts, bound to its implementation if there is one. */
export function bindServices(services: RpcServices, onFault: FaultSink): readonly BoundMethod[] {
  return [
    ...bindService(Router, services.router ?? {}, onFault),
    ...bindService(PoolRegistry, services.poolRegistry ?? {}, onFault),
    ...bindService(KVCacheStore, services.kvCacheStore ?? {}, onFault),
  ];
}
