import type { ConnectRouter, ServiceImpl } from '@connectrpc/connect';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import { bindService, type FaultSink } from './bind.ts';

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

/** Options of {@link createRpcRoutes}. */
export interface RpcRoutesOptions {
  /** Gets every fault of an implementation. Default: none is told. */
  readonly onFault?: FaultSink;
  /** Ends every open stream with its reason when it aborts; unary calls go on. Default: streams end by themselves. */
  readonly streamStop?: AbortSignal;
}

/** Mounts all three services, whichever adapter the router is for. */
export function createRpcRoutes(
  services: RpcServices,
  options: RpcRoutesOptions = {},
): (router: ConnectRouter) => void {
  const onFault = options.onFault ?? (() => undefined);
  return (router) => {
    const methods = [
      ...bindService(Router, services.router ?? {}, onFault),
      ...bindService(PoolRegistry, services.poolRegistry ?? {}, onFault),
      ...bindService(KVCacheStore, services.kvCacheStore ?? {}, onFault),
    ];
    for (const bound of methods) {
      if (bound.kind === 'unary') router.rpc(bound.method, bound.call);
      else router.rpc(bound.method, bound.call, options.streamStop ? { shutdownSignal: options.streamStop } : {});
    }
  };
}
