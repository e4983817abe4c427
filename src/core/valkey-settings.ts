/** How the server of the valkey backend is reached. */
export interface ValkeySettings {
  /** `redis://`, `rediss://`, `valkey://` or `valkeys://`, with user and password if it wants them; never shown or logged. */
  readonly url: string;
  /** File that holds the password. */
  readonly passwordFile?: string;
  /** Whether the server is a node of a cluster. */
  readonly cluster: boolean;
  /** `host:port` of sentinels, which tell where the primary is; the host of the URL is then not used. */
  readonly sentinels: readonly string[];
  /** Name of the primary at the sentinels. */
  readonly sentinelName: string;
  /** What all names at the server begin with: stores with equal prefixes are one store. */
  readonly prefix: string;
  /** File with the certificates that a TLS server is checked by. Default those of Node. */
  readonly caFile?: string;
}
