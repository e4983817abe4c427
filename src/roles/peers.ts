import type { Config } from '../config/config.ts';
import { parseSecret } from '../config/values.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { Tracer } from '../obs/tracer.ts';
import { connectRemote, type RemoteOptions, type RemoteServices } from '../rpc/clients.ts';
import { StartError } from './listen.ts';
import { checkPem, endOfChain, type PemTexts } from './pem.ts';
import { watchFiles } from './watched-files.ts';

/** Makes clients of another process; the stack closes them. */
export type ConnectTo = (
  url: string | undefined,
  options?: Pick<RemoteOptions, 'breaker' | 'onEnd' | 'onCall'>,
) => RemoteServices;

/** What {@link createPeers} needs; without `metrics` nobody is told when the certificate ends. */
interface PeersParts {
  readonly tracer?: Tracer | undefined;
  readonly metrics?: Metrics;
  readonly log: Logger;
  readonly stack: AsyncDisposableStack;
}

/** Reads what this process shows to others; nothing is read, and nothing watched, before the first connection. */
export function createPeers(config: Config['rpcClient'], parts: PeersParts): ConnectTo {
  const { tracer, log, stack } = parts;
  let credentials: Omit<RemoteOptions, 'url'> | undefined;
  return (url, options) => {
    if (url === undefined)
      throw new StartError('a role that runs elsewhere needs its URL (--router-url, --registry-url)');
    credentials ??= { ...tokenOf(config, log, stack), ...tlsOf(config, parts) };
    return stack.use(connectRemote({ url, ...credentials, ...options, ...(tracer === undefined ? {} : { tracer }) }));
  };
}

function tokenOf(
  { tokenFile, token }: Config['rpcClient'],
  log: Logger,
  stack: AsyncDisposableStack,
): Pick<RemoteOptions, 'token'> {
  if (tokenFile === undefined) return token === undefined ? {} : { token };
  const files = [{ name: 'rpc_client.token_file', path: tokenFile }];
  const make = ([text = '']: readonly string[]) => {
    const parsed = parseSecret(text.trim());
    // The message says what a key is and not what the file holds.
    if (parsed.kind === 'bad') throw new StartError(`${tokenFile}: ${parsed.message}`);
    return parsed.value;
  };
  const watched = stack.use(watchFiles({ files, make, log }));
  return { token: () => watched.current };
}

function tlsOf(config: Config['rpcClient'], { metrics, log, stack }: PeersParts): Pick<RemoteOptions, 'tls'> {
  const files = (['ca', 'cert', 'key'] as const).flatMap((key) => {
    const path = config[key];
    return path === undefined ? [] : [{ name: `rpc_client.${key}`, key, path }];
  });
  if (files.length === 0) return {};
  const make = (texts: readonly string[]): PemTexts => {
    const pem = Object.fromEntries(files.map(({ key }, index) => [key, texts[index] ?? '']));
    checkPem(pem);
    return pem;
  };
  const use = ({ cert }: PemTexts) => {
    if (cert !== undefined) metrics?.certificateUsed('rpc_client', endOfChain(cert));
  };
  const watched = stack.use(watchFiles({ files, make, use, log }));
  use(watched.current);
  const tls: Record<string, string> = {};
  for (const { key } of files) {
    Object.defineProperty(tls, key, { enumerable: true, get: () => watched.current[key] });
  }
  return { tls };
}
