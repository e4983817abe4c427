/** TLS of a server; each member as PEM. */
export interface ServerTls {
  readonly cert: string;
  readonly key: string;
  /** Authorities of clients' certificates; with it a client without such a certificate is turned away. */
  readonly clientCa?: string;
}

/** What Node makes a context of it from. */
export function contextOf({ cert, key, clientCa }: ServerTls) {
  return { cert, key, ...(clientCa === undefined ? {} : { ca: clientCa }) };
}
