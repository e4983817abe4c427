import type { Config } from '../config/config.ts';
import type { Settings } from '../config/settings.ts';
import { parseRpcTokens } from '../core/tenant.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { FaultSink } from '../rpc/bind.ts';
import { type CallerOf, createCallerOf } from '../rpc/caller.ts';
import { RPC_MAX_TIMEOUT_MS } from '../rpc/limits.ts';
import { type RpcListener, startRpcListener } from '../rpc/listener.ts';
import type { RpcServices } from '../rpc/routes.ts';
import { SocketPathError } from '../rpc/unix-socket.ts';
import { failStart, formatAddress, StartError } from './listen.ts';
import { watchServerTls } from './server-tls.ts';
import { watchKeys } from './watched-files.ts';

/** Where the RPC services of a process are reached. */
export interface RpcAddresses {
  readonly rpc?: string;
  readonly rpcSocket?: string;
}

/** What {@link openRpc} serves, and with what. */
export interface RpcParts {
  readonly settings: Settings;
  readonly services: RpcServices;
  readonly callerOf: CallerOf;
  readonly onFault: FaultSink;
  readonly metrics: Metrics;
  readonly log: Logger;
  readonly stack: AsyncDisposableStack;
}

/** Tells who calls the RPC port, by its file of tokens, which the stack stops to watch. */
export function watchCallers(config: Config, log: Logger, stack: AsyncDisposableStack): CallerOf {
  const { tokensFile } = config.rpc;
  if (tokensFile === undefined) return createCallerOf(() => undefined, config.reuse.unsafe);
  return watchTokens('rpc.tokens_file', tokensFile, config.reuse.unsafe, log, stack);
}

/** Tells who calls by a file of tokens, which the stack stops to watch; `name` is its key of the settings. */
export function watchTokens(
  name: string,
  file: string,
  unsafe: boolean,
  log: Logger,
  stack: AsyncDisposableStack,
): CallerOf {
  const tokens = stack.use(watchKeys(name, file, parseRpcTokens, log));
  return createCallerOf(() => tokens.current, unsafe);
}

/** Opens the RPC port and the socket, as far as the settings want them; the stack drains and closes both. */
export async function openRpc(parts: RpcParts): Promise<RpcAddresses> {
  const { settings, services, callerOf, onFault, metrics, log, stack } = parts;
  const config = settings.current;
  const { host, port, socket, tls } = config.rpc;
  const watchedTls =
    tls === undefined || port === 'off'
      ? undefined
      : watchServerTls('rpc', tls, { metrics, log }, (next) => rpc.useTls(next));
  if (watchedTls !== undefined) stack.use(watchedTls);
  const rpc: RpcListener = await startRpcListener({
    host,
    port,
    ...(watchedTls === undefined ? {} : { tls: watchedTls.current }),
    ...(socket === undefined ? {} : { socketPath: socket }),
    services,
    callerOf,
    onFault,
    onCall: (call) => metrics.rpcServed(call),
    maxConnections: config.rpc.maxConnections,
  }).catch((error: unknown) => failRpc(error, config.rpc));
  // 0 is no limit.
  stack.defer(() => rpc.close(settings.current.timeouts.drainMs || RPC_MAX_TIMEOUT_MS));
  return {
    ...(port === 'off' ? {} : { rpc: formatAddress(rpc.host, rpc.port) }),
    ...(socket === undefined ? {} : { rpcSocket: socket }),
  };
}

function failRpc(error: unknown, { host, port, socket }: Config['rpc']): never {
  if (error instanceof SocketPathError) throw new StartError(`${error.message} (--rpc-socket)`, { cause: error });
  // Node calls the path of a socket its address.
  if (port === 'off' || (error instanceof Error && 'address' in error && error.address === socket)) {
    const code = error instanceof Error && 'code' in error ? String(error.code) : String(error);
    throw new StartError(`cannot listen on ${socket}: ${code} (--rpc-socket)`, { cause: error });
  }
  return failStart(error, host, port, '--rpc-port');
}
