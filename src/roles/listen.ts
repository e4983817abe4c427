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
  const what =
    code === 'EADDRINUSE'
      ? `port ${port} is in use`
      : code === 'EADDRNOTAVAIL' || code === 'ENOTFOUND'
        ? `${host} is no address of this machine`
        : code === 'EACCES'
          ? `port ${port} needs more rights`
          : `cannot listen on ${host}:${port}`;
  throw new StartError(`${what} (${flag})`, { cause: error });
}

/** Lets running requests finish; when time is up their connections are closed. */
export async function drain(app: FastifyInstance, drainMs: number): Promise<void> {
  const timer = drainMs === 0 ? undefined : setTimeout(() => app.server.closeAllConnections(), drainMs);
  await app.close();
  clearTimeout(timer);
}

/** `host:port`, IPv6 in brackets. */
export function formatAddress(host: string, port: number): string {
  return host.includes(':') ? `[${host}]:${port}` : `${host}:${port}`;
}
