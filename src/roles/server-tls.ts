import type { TlsConfig } from '../config/config.ts';
import type { ServerTls } from '../core/server-tls.ts';
import type { Logger } from '../obs/log.ts';
import { checkPem } from './pem.ts';
import { type Watched, watchFiles } from './watched-files.ts';

/** Reads the certificates of a listener, now and whenever they change; `name` is the section of the settings. */
export function watchServerTls(
  name: string,
  { cert, key, clientCa }: TlsConfig,
  log: Logger,
  use: (tls: ServerTls) => void,
): Watched<ServerTls> {
  return watchFiles({
    files: [
      { name: `${name}.cert`, path: cert },
      { name: `${name}.key`, path: key },
      ...(clientCa === undefined ? [] : [{ name: `${name}.client_ca`, path: clientCa }]),
    ],
    make: ([certText = '', keyText = '', ca]): ServerTls => {
      checkPem({ cert: certText, key: keyText, ca });
      return { cert: certText, key: keyText, ...(ca === undefined ? {} : { clientCa: ca }) };
    },
    use,
    log,
  });
}
