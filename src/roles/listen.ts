import type { AddressInfo } from 'node:net';
import type { FastifyInstance } from 'fastify';
import type { Logger } from '../obs/log.ts';

/** A process could not start; the message names the flag. */
export class StartError extends Error {
  override readonly name = 'StartError';
}

/** Opens a server's listener; a failure names the flag. */
export async function listen(
  app: FastifyInstance,
  host: string,
  port: number | 'off',
  flag: string,
  log: Logger,
): Promise<string> {
  if (port === 'off') {
    log.warn({ flag }, 'this listener is off');
    return 'off';
  }
  await app.listen({ host, port }).catch((error: unknown) => failStart(error, host, port, flag));
  const address = app.server.address() as AddressInfo;
  return formatAddress(address.address, address.port);
}

/** Why a listener could not be opened, in words and with its flag. */
export function failStart(error: unknown, host: string, port: number, flag: string): never {
  const code = error instanceof Error && 'code' in error ? error.code : undefined;
  if (code === 'EADDRNOTAVAIL' || code === 'ENOTFOUND') {
    throw new StartError(`${host} is no address of this machine (${flag.replace('port', 'host')})`, { cause: error });
  }
  const what =
    code === 'EADDRINUSE'
      ? `port ${port} is in use`
      : code === 'EACCES'
        ? `port ${port} needs more rights`
        : `cannot listen on ${host}:${port}`;
  throw new StartError(`${what} (${flag})`, { cause: error });
}

/** Lets running requests finish; when time is up their clients are told, and then the connections are closed. */
export async function drain(
  app: FastifyInstance,
  replies: ReadonlySet<{ readonly stop: () => void }>,
  drainMs: number,
): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  if (drainMs > 0) {
    timer = setTimeout(() => {
      for (const reply of replies) reply.stop();
      timer = setTimeout(() => app.server.closeAllConnections(), LAST_WORDS_MS);
    }, drainMs);
  }
  await app.close();
  clearTimeout(timer);
}

/** Time for the last bytes to reach the clients. */
const LAST_WORDS_MS = 500;

/** `host:port`, IPv6 in brackets. */
export function formatAddress(host: string, port: number): string {
  return host.includes(':') ? `[${host}]:${port}` : `${host}:${port}`;
}
