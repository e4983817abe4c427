/** The client's side of a reply, as the services see it; the HTTP shell implements it. */
export interface ClientSink {
  /** Aborts when the client left, or took no byte for too long; the reason says which. */
  readonly signal: AbortSignal;
  /** Sends status and headers; called at most once, before any byte. */
  readonly start: (status: number, headers: Readonly<Record<string, string>>) => void;
  /** `pieces`: how many the reply had of these; default 1. */
  readonly write: (bytes: Uint8Array | string, pieces?: number) => void;
  readonly end: () => void;
  /** Bytes written but not yet taken by the client's socket. */
  readonly bufferedBytes: () => number;
  /** Calls back once, when the buffer has emptied. */
  readonly onceDrained: (callback: () => void) => void;
}
