import type { Client, HandlerContext, ServiceImpl } from '@connectrpc/connect';
import type { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';

/**
 * A registry elsewhere, served again: a facade that knows only its router's address sees the pools through it. Calls and
 * their ends are passed on as they are.
 */
export function relayRegistry(registry: Client<typeof PoolRegistry>): Partial<ServiceImpl<typeof PoolRegistry>> {
  const pass = ({ signal }: Pick<HandlerContext, 'signal'>) => ({ signal });
  return {
    registerInstance: (request, context) => registry.registerInstance(request, pass(context)),
    renewLease: (request, context) => registry.renewLease(request, pass(context)),
    deregisterInstance: (request, context) => registry.deregisterInstance(request, pass(context)),
    getInstance: (request, context) => registry.getInstance(request, pass(context)),
    listInstances: (request, context) => registry.listInstances(request, pass(context)),
    drainInstance: (request, context) => registry.drainInstance(request, pass(context)),
    resumeInstance: (request, context) => registry.resumeInstance(request, pass(context)),
    watchInstances: (request, context) => registry.watchInstances(request, pass(context)),
  };
}
