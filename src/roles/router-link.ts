import { type Client, Code, ConnectError } from '@connectrpc/connect';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import { HealthCheckResponse_ServingStatus as Status } from '../../gen/grpc/health/v1/health_pb.ts';
import type { Settings } from '../config/settings.ts';
import type { FaultSink } from '../rpc/bind.ts';
import type { RemoteServices } from '../rpc/clients.ts';
import { createDirectClient } from '../rpc/direct-client.ts';
import type { RouterService } from '../services/router.ts';
import { RouterCheck } from '../services/router-check.ts';
import type { ConnectTo } from './peers.ts';

/** The router of a facade. */
export interface RouterLink {
  readonly router: Client<typeof Router>;
  /** Undefined for a router in this process. */
  readonly routerCheck: RouterCheck | undefined;
}

/** The router of this process, or the one that the settings name, which is asked regularly whether it serves. */
export function linkRouter(
  settings: Settings,
  local: RouterService | undefined,
  connectTo: ConnectTo,
  onFault: FaultSink,
  stack: AsyncDisposableStack,
): RouterLink {
  if (local !== undefined) return { router: createDirectClient(Router, local, onFault), routerCheck: undefined };
  const { health, router } = connectTo(settings.current.routerUrl);
  const ask = (signal: AbortSignal) => serves(health, signal);
  const routerCheck = new RouterCheck({
    ask,
    now: () => performance.now(),
    get timeoutMs() {
      return Math.min(settings.current.timeouts.routerMs || ASK_MS, ASK_MS);
    },
  });
  return { router, routerCheck: stack.use(routerCheck) };
}

/** A router that needs longer for such an answer plans nothing in time either. */
const ASK_MS = 2000;

async function serves(health: RemoteServices['health'], signal: AbortSignal): Promise<boolean> {
  try {
    const { status } = await health.check({ service: Router.typeName }, { signal });
    return status === Status.SERVING;
  } catch (error) {
    // A proxy in between may not pass this service on; that it answered is enough.
    if (ConnectError.from(error).code === Code.Unimplemented) return true;
    throw error;
  }
}
