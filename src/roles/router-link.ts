import { type Client, Code, ConnectError } from '@connectrpc/connect';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import { HealthCheckResponse_ServingStatus as Status } from '../../gen/grpc/health/v1/health_pb.ts';
import type { Settings } from '../config/settings.ts';
import { BatonError, type ErrorReasonName } from '../core/errors.ts';
import type { Logger } from '../obs/log.ts';
import type { FaultSink } from '../rpc/bind.ts';
import type { RemoteServices } from '../rpc/clients.ts';
import { createDirectClient } from '../rpc/direct-client.ts';
import { batonErrorFrom, isRefusal } from '../rpc/errors.ts';
import type { RpcServices } from '../rpc/routes.ts';
import { RouterCheck } from '../services/router-check.ts';
import { PeerLog } from './peer-log.ts';
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
  local: RpcServices['router'],
  connectTo: ConnectTo,
  onFault: FaultSink,
  log: Logger,
  stack: AsyncDisposableStack,
): RouterLink {
  if (local !== undefined) return { router: createDirectClient(Router, local, onFault), routerCheck: undefined };
  const { health, router } = connectTo(settings.current.routerUrl);
  const { note } = new PeerLog(log, 'router');
  const ask = async (signal: AbortSignal) => {
    await throwRefusal(router, signal);
    const isServing = await serves(health, signal);
    if (isServing) note(undefined);
    return isServing;
  };
  const routerCheck = new RouterCheck({
    ask,
    onFailure: note,
    now: () => performance.now(),
    get timeoutMs() {
      return Math.min(settings.current.timeouts.routerMs || ASK_MS, ASK_MS);
    },
  });
  return { router, routerCheck: stack.use(routerCheck) };
}

/** A router that needs longer for such an answer plans nothing in time either. */
const ASK_MS = 2000;

/** Throws if the router would not plan for this process: asked with a dry run without a request. */
async function throwRefusal(router: Client<typeof Router>, signal: AbortSignal): Promise<void> {
  try {
    await router.explainRoute({}, { signal });
  } catch (error) {
    if (isRefusal(error)) throw error;
  }
}

/** A failed call to the router as a client may see it: what is wrong between the two processes is no fault of the client. */
export function routerError(error: unknown): BatonError {
  const known = batonErrorFrom(error, 'ROUTER_UNAVAILABLE');
  if (!OWN_FAULTS.has(known.reason) && known.reason !== 'ROUTER_UNAVAILABLE') return known;
  const message = 'The router does not answer.';
  return new BatonError({ reason: 'ROUTER_UNAVAILABLE', message, retryAfterMs: 1000 }, { cause: error });
}

const OWN_FAULTS: ReadonlySet<ErrorReasonName> = new Set([
  'CREDENTIAL_REQUIRED',
  'OPERATOR_REQUIRED',
  'TENANT_FORBIDDEN',
  'NOT_IMPLEMENTED',
]);

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
