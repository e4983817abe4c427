import type { TlsConfig } from '../config/config.ts';
import type { ServerTls } from '../core/server-tls.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import { checkPem, endOfChain } from './pem.ts';
import { type Watched, watchFiles } from './watched-files.ts';

/** Reads the certificates of a listener, now and whenever they change. */
export function watchServerTls(
  listener: 'facade' | 'rpc' | 'admin',
  { cert, key, clientCa }: TlsConfig,
  { metrics, log }: { readonly metrics: Metrics; readonly log: Logger },
  use: (tls: ServerTls) => void,
): Watched<ServerTls> {
  const tellEnd = (tls: ServerTls) => metrics.certificateUsed(listener, endOfChain(tls.cert));
  const watched = watchFiles({
    files: [
      { name: `${listener}.tls.cert`, path: cert },
      { name: `${listener}.tls.key`, path: key },
      ...(clientCa === undefined ? [] : [{ name: `${listener}.tls.client_ca`, path: clientCa }]),
    ],
    make: ([certText = '', keyText = '', ca]): ServerTls => {
      checkPem({ cert: certText, key: keyText, ca });
      return { cert: certText, key: keyText, ...(ca === undefined ? {} : { clientCa: ca }) };
    },
    use(tls) {
      use(tls);
      tellEnd(tls);
    },
    log,
  });
  tellEnd(watched.current);
  return watched;
}
