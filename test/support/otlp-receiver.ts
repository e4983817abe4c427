import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { gunzipSync } from 'node:zlib';
import { BinaryReader, WireType } from '@bufbuild/protobuf/wire';

/** A span as it came by OTLP. */
export interface ReceivedSpan {
  readonly service: string;
  readonly traceId: string;
  readonly spanId: string;
  /** Empty for the first of a trace. */
  readonly parentId: string;
  readonly name: string;
  /** 1 internal, 2 server, 3 client. */
  readonly kind: number;
  /** Nanoseconds since 1970. */
  readonly startAt: bigint;
  readonly endAt: bigint;
  readonly attributes: Readonly<Record<string, string | number | boolean>>;
  /** Message of an error status; undefined without one. */
  readonly failure: string | undefined;
}

/** Takes traces as a collector does, by OTLP over HTTP in protobuf. */
export interface OtlpReceiver extends AsyncDisposable {
  readonly url: string;
  readonly spans: readonly ReceivedSpan[];
  /** What was sent, as it came: for what must not be in it. */
  readonly bodies: readonly Buffer[];
  /** Requests that are no OTLP, and why. */
  readonly refused: readonly string[];
}

/** Starts a receiver on a free port; with `status` it refuses whatever comes. */
export async function startOtlpReceiver(status = 200): Promise<OtlpReceiver> {
  const spans: ReceivedSpan[] = [];
  const bodies: Buffer[] = [];
  const refused: string[] = [];
  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on('data', (chunk: Buffer) => chunks.push(chunk));
    request.on('end', () => {
      const { 'content-type': type, 'content-encoding': encoding } = request.headers;
      const sent = Buffer.concat(chunks);
      try {
        const isOtlp = request.method === 'POST' && request.url === '/v1/traces' && type === 'application/x-protobuf';
        if (!isOtlp) throw new Error(`${request.method} ${request.url} ${type}`);
        const body = encoding === 'gzip' ? gunzipSync(sent) : sent;
        bodies.push(body);
        if (status === 200) spans.push(...readRequest(body));
      } catch (error) {
        refused.push(String(error));
      }
      // An ExportTraceServiceResponse without a partial success has no bytes.
      response.writeHead(status, { 'content-type': 'application/x-protobuf' }).end();
    });
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as AddressInfo;
  return {
    url: `http://127.0.0.1:${port}`,
    spans,
    bodies,
    refused,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}

/** Reads the fields of a message, each by its number; a number that is not asked for is skipped, as protobuf has it. */
function readMessage(bytes: Uint8Array, fields: Readonly<Record<number, (reader: BinaryReader) => void>>): void {
  const reader = new BinaryReader(bytes);
  while (reader.pos < reader.len) {
    const [number, wireType] = reader.tag();
    const read = fields[number];
    if (read === undefined) reader.skip(wireType, wireType === WireType.StartGroup ? number : undefined);
    else read(reader);
  }
}

/** ExportTraceServiceRequest of opentelemetry/proto/collector/trace/v1. */
function readRequest(bytes: Uint8Array): readonly ReceivedSpan[] {
  const spans: ReceivedSpan[] = [];
  readMessage(bytes, { 1: (reader) => spans.push(...readResourceSpans(reader.bytes())) });
  return spans;
}

function readResourceSpans(bytes: Uint8Array): readonly ReceivedSpan[] {
  const found: Uint8Array[] = [];
  let resource: ReceivedSpan['attributes'] = {};
  readMessage(bytes, {
    1: (reader) => {
      resource = readAttributes(reader.bytes(), 1);
    },
    2: (reader) => readMessage(reader.bytes(), { 2: (scope) => found.push(scope.bytes()) }),
  });
  return found.map((span) => readSpan(span, String(resource['service.name'])));
}

function readSpan(bytes: Uint8Array, service: string): ReceivedSpan {
  const span = { service, traceId: '', spanId: '', parentId: '', name: '', kind: 0, startAt: 0n, endAt: 0n };
  let failure: string | undefined;
  readMessage(bytes, {
    1: (reader) => {
      span.traceId = hexOf(reader.bytes());
    },
    2: (reader) => {
      span.spanId = hexOf(reader.bytes());
    },
    4: (reader) => {
      span.parentId = hexOf(reader.bytes());
    },
    5: (reader) => {
      span.name = reader.string();
    },
    6: (reader) => {
      span.kind = reader.int32();
    },
    7: (reader) => {
      span.startAt = BigInt(reader.fixed64());
    },
    8: (reader) => {
      span.endAt = BigInt(reader.fixed64());
    },
    15: (reader) => {
      let message = '';
      readMessage(reader.bytes(), {
        2: (status) => {
          message = status.string();
        },
        3: (status) => {
          if (status.int32() === 2) failure = message;
        },
      });
    },
  });
  return { ...span, failure, attributes: readAttributes(bytes, 9) };
}

/** The KeyValue fields of this number. */
function readAttributes(bytes: Uint8Array, number: number): ReceivedSpan['attributes'] {
  const attributes: Record<string, string | number | boolean> = {};
  readMessage(bytes, {
    [number]: (reader) => {
      let key = '';
      let value: string | number | boolean = '';
      readMessage(reader.bytes(), {
        1: (pair) => {
          key = pair.string();
        },
        2: (pair) => {
          readMessage(pair.bytes(), {
            1: (any) => {
              value = any.string();
            },
            2: (any) => {
              value = any.bool();
            },
            3: (any) => {
              value = Number(any.int64());
            },
            4: (any) => {
              value = any.double();
            },
          });
        },
      });
      attributes[key] = value;
    },
  });
  return attributes;
}

function hexOf(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString('hex');
}
