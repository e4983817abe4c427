import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { ServerTls } from '../../src/core/server-tls.ts';
import type { ClientTls } from '../../src/rpc/clients.ts';

/** Folder of the certificates that `make.sh` in it has made. */
export const TLS_FOLDER = join(import.meta.dirname, '..', 'fixtures', 'tls');

/** One of the files, as PEM. */
export function pem(name: string): string {
  return readFileSync(join(TLS_FOLDER, name), 'utf8');
}

/** A server that wants certificates of the same authority. */
export const SERVER_TLS: ServerTls = { cert: pem('server.pem'), key: pem('server.key'), clientCa: pem('ca.pem') };

/** A client that such a server lets in. */
export const CLIENT_TLS: ClientTls = { ca: pem('ca.pem'), cert: pem('client.pem'), key: pem('client.key') };
