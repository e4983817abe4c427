import type { Config } from '../config/config.ts';
import { buildAdmin } from '../http/admin.ts';
import type { OperatorGate } from '../http/operator-gate.ts';
import type { ReloadOptions } from '../http/reload.ts';
import { renewTls } from '../http/server-options.ts';
import type { WorkersOptions } from '../http/workers.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { CallerOf } from '../rpc/caller.ts';
import { drain, listen } from './listen.ts';
import { watchTokens } from './rpc-port.ts';
import { watchServerTls } from './server-tls.ts';

/** What {@link openAdmin} serves, and with what. */
export interface AdminParts {
  readonly config: Config;
  readonly metrics: Metrics;
  /** Who calls by the tokens of the RPC port. */
  readonly callerOf: CallerOf;
  readonly reload: ReloadOptions['reload'];
  /** Undefined where nothing is known of pools. */
  readonly workers: Omit<WorkersOptions, keyof OperatorGate> | undefined;
  readonly log: Logger;
  readonly stack: AsyncDisposableStack;
}

/** Head and body of a request together have as long. */
const HEADER_MS = 30_000;
const HEADER_BYTES = 32_768;
const DRAIN_MS = 1_000;

/** Opens the admin port, which the stack drains and closes; tells its address. */
export async function openAdmin(parts: AdminParts): Promise<string> {
  const { config, metrics, reload, workers, log, stack } = parts;
  const { tokensFile, tls, host, port, maxConnections } = config.admin;
  const own = tokensFile === undefined ? undefined : watchTokens('admin.tokens_file', tokensFile, false, log, stack);
  const gate: OperatorGate =
    own === undefined
      ? { callerOf: parts.callerOf, hasTokens: config.rpc.tokensFile !== undefined }
      : { callerOf: own, hasTokens: true };
  const watched =
    tls === undefined
      ? undefined
      : stack.use(watchServerTls('admin', tls, { metrics, log }, (next) => renewTls(admin, next)));
  const admin = buildAdmin(metrics, { ...gate, reload }, workers === undefined ? undefined : { ...gate, ...workers }, {
    limits: { headerBytes: HEADER_BYTES, headerMs: HEADER_MS, connections: maxConnections },
    tls: watched?.current,
    guard: own === undefined ? undefined : gate,
    log,
  });
  const address = await listen(admin, host, port, '--admin-port', log);
  // What is asked there takes no time; a peer that is half-way through its question may take for ever.
  stack.defer(() => drain(admin, new Set(), DRAIN_MS));
  return address;
}
