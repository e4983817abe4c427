import { once } from 'node:events';
import type { IncomingMessage, ServerResponse } from 'node:http';
import { createServer } from 'node:https';
import type { AddressInfo, Socket } from 'node:net';
import { CLIENT_TLS, SERVER_TLS } from './tls.ts';

/** An EndpointSlice as the server writes it. */
export interface FakeSlice {
  readonly apiVersion: 'discovery.k8s.io/v1';
  readonly kind: 'EndpointSlice';
  readonly metadata: {
    readonly name: string;
    readonly namespace: string;
    readonly labels: Readonly<Record<string, string>>;
    readonly resourceVersion: string;
  };
  readonly addressType: 'IPv4' | 'IPv6';
  readonly endpoints: readonly {
    readonly addresses: readonly string[];
    readonly conditions: { readonly ready: boolean };
    readonly targetRef: { readonly kind: 'Pod'; readonly name: string };
  }[];
  readonly ports: readonly { readonly name: string; readonly port: number; readonly protocol: 'TCP' }[];
}

/** What a test says of a slice; an address with `!` behind it is not ready. */
export interface SliceInit {
  readonly labels?: Readonly<Record<string, string>>;
  readonly addresses: readonly string[];
  readonly port?: number;
  /** What the pods are called, without their number; default the name of the slice. */
  readonly pods?: string;
}

const CA = Buffer.from(CLIENT_TLS.ca ?? '').toString('base64');

type EventType = 'ADDED' | 'MODIFIED' | 'DELETED';

interface Change {
  readonly version: number;
  readonly before: FakeSlice | undefined;
  readonly after: FakeSlice | undefined;
}

/**
 * The part of a Kubernetes API server that serves EndpointSlices, all of one namespace: lists in pages, watches from a version with
 * bookmarks, label selectors by which objects enter and leave a watch, 410 for versions that are compacted (in the stream, or as
 * the status of the answer), and refusals.
 */
export class FakeKubeApi implements AsyncDisposable {
  /** Requests so far: `list`, `list+` for a later page, or `watch VERSION`. */
  readonly requests: string[] = [];
  /** Answers every request with this status instead. */
  refuse: number | undefined;
  /** How a version that is compacted is refused. */
  goneAs: 'event' | 'status' = 'event';
  /** Objects of a page, whatever the client wants. */
  pageSize = 2;
  readonly #namespace: string;
  readonly #slices = new Map<string, FakeSlice>();
  readonly #changes: Change[] = [];
  readonly #watches = new Set<{ readonly selector: Selector; readonly response: ServerResponse }>();
  readonly #server = createServer({ cert: SERVER_TLS.cert, key: SERVER_TLS.key }, (request, response) =>
    this.#serve(request, response),
  );
  readonly #sockets = new Set<Socket>();
  // Real servers do not begin at 1 either.
  #version = 1000;
  #compacted = 0;

  private constructor(namespace: string) {
    this.#namespace = namespace;
    // Also those that have not come as far as a request.
    this.#server.on('connection', (socket: Socket) => {
      this.#sockets.add(socket);
      socket.on('close', () => this.#sockets.delete(socket));
    });
  }

  static async start(namespace: string): Promise<FakeKubeApi> {
    const api = new FakeKubeApi(namespace);
    api.#server.listen(0, '127.0.0.1');
    await once(api.#server, 'listening');
    return api;
  }

  get url(): string {
    const { port } = this.#server.address() as AddressInfo;
    return `https://127.0.0.1:${port}`;
  }

  get openWatches(): number {
    return this.#watches.size;
  }

  /** A kubeconfig that leads here. */
  get kubeconfig(): string {
    return JSON.stringify({
      apiVersion: 'v1',
      kind: 'Config',
      clusters: [{ name: 'fake', cluster: { server: this.url, 'certificate-authority-data': CA } }],
      users: [{ name: 'me', user: { token: 't' } }],
      contexts: [{ name: 'fake', context: { cluster: 'fake', user: 'me', namespace: this.#namespace } }],
      'current-context': 'fake',
    });
  }

  /** Makes or changes a slice. */
  put(name: string, { labels = {}, addresses, port = 8000, pods = name }: SliceInit): void {
    this.#version += 1;
    this.#change(name, {
      apiVersion: 'discovery.k8s.io/v1',
      kind: 'EndpointSlice',
      metadata: { name, namespace: this.#namespace, labels, resourceVersion: String(this.#version) },
      addressType: addresses.some((address) => address.includes(':')) ? 'IPv6' : 'IPv4',
      endpoints: addresses.map((address, i) => ({
        addresses: [address.replace('!', '')],
        conditions: { ready: !address.endsWith('!') },
        targetRef: { kind: 'Pod', name: `${pods}-${i}` },
      })),
      ports: [{ name: 'http', port, protocol: 'TCP' }],
    });
  }

  delete(name: string): void {
    this.#version += 1;
    this.#change(name, undefined);
  }

  /** Tells every watch how far it is, without a change that it would see. */
  bookmark(): void {
    this.#version += 1;
    const object = {
      kind: 'EndpointSlice',
      apiVersion: 'discovery.k8s.io/v1',
      metadata: { resourceVersion: String(this.#version), creationTimestamp: null },
    };
    for (const { response } of this.#watches) write(response, 'BOOKMARK', object);
  }

  /** Forgets all changes so far: a watch from an earlier version is 410 Gone. */
  compact(): void {
    this.#compacted = this.#version;
  }

  /** Ends every watch, as a server does after its time, or breaks their connections. */
  endWatches(how: 'end' | 'break' = 'end'): void {
    for (const { response } of this.#watches) {
      if (how === 'end') response.end();
      else response.destroy();
    }
    this.#watches.clear();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const closed = once(this.#server, 'close');
    this.#server.close();
    for (const socket of this.#sockets) socket.destroy();
    await closed;
  }

  #change(name: string, after: FakeSlice | undefined): void {
    const change: Change = { version: this.#version, before: this.#slices.get(name), after };
    if (after === undefined) this.#slices.delete(name);
    else this.#slices.set(name, after);
    this.#changes.push(change);
    for (const { selector, response } of this.#watches) tell(response, selector, change);
  }

  #serve(request: IncomingMessage, response: ServerResponse): void {
    const { pathname, searchParams } = new URL(request.url ?? '', 'https://fake');
    if (this.refuse !== undefined) return status(response, this.refuse, 'refused by the test');
    if (request.headers.authorization !== 'Bearer t') return status(response, 401, 'Unauthorized');
    const group = '/apis/discovery.k8s.io/v1';
    if (![`${group}/namespaces/${this.#namespace}/endpointslices`, `${group}/endpointslices`].includes(pathname)) {
      return status(response, 404, 'the server could not find the requested resource');
    }
    const selector = parseSelector(searchParams.get('labelSelector') ?? '');
    if (searchParams.get('watch') === 'true') this.#watch(response, selector, searchParams);
    else this.#list(response, selector, searchParams);
  }

  #list(response: ServerResponse, selector: Selector, query: URLSearchParams): void {
    const from = Number(query.get('continue') ?? '0');
    this.requests.push(from === 0 ? 'list' : 'list+');
    const all = [...this.#slices.values()].filter((slice) => matches(slice, selector));
    const limit = Math.min(this.pageSize, Number(query.get('limit') ?? this.pageSize));
    const next = from + limit < all.length ? String(from + limit) : '';
    response.writeHead(200, { 'content-type': 'application/json' }).end(
      JSON.stringify({
        kind: 'EndpointSliceList',
        apiVersion: 'discovery.k8s.io/v1',
        metadata: { resourceVersion: String(this.#version), ...(next === '' ? {} : { continue: next }) },
        items: all.slice(from, from + limit),
      }),
    );
  }

  #watch(response: ServerResponse, selector: Selector, query: URLSearchParams): void {
    const version = Number(query.get('resourceVersion') ?? '0');
    this.requests.push(`watch ${version}`);
    const isGone = version < this.#compacted;
    if (isGone && this.goneAs === 'status') return status(response, 410, 'too old resource version');
    response.writeHead(200, { 'content-type': 'application/json' });
    if (isGone) {
      write(response, 'ERROR', statusObject(410, 'too old resource version'));
      response.end();
      return;
    }
    response.flushHeaders();
    for (const change of this.#changes) if (change.version > version) tell(response, selector, change);
    const watch = { selector, response };
    this.#watches.add(watch);
    response.on('close', () => this.#watches.delete(watch));
  }
}

type Selector = readonly (readonly [string, readonly string[]])[];

/** `a=b`, `a==b` and `a in (b,c)`, joined by commas. */
function parseSelector(text: string): Selector {
  return [...text.matchAll(/([\w./-]+)\s*(?:==?\s*([\w.-]+)|in\s*\(([^)]*)\))/g)].map(
    ([, name = '', one, many = '']) => [name, one === undefined ? many.split(',').map((value) => value.trim()) : [one]],
  );
}

function matches(slice: FakeSlice | undefined, selector: Selector): boolean {
  return (
    slice !== undefined && selector.every(([name, values]) => values.includes(slice.metadata.labels[name] ?? '\0'))
  );
}

function tell(response: ServerResponse, selector: Selector, { before, after, version }: Change): void {
  const [was, is] = [matches(before, selector), matches(after, selector)];
  if (!was && !is) return;
  const type: EventType = is ? (was ? 'MODIFIED' : 'ADDED') : 'DELETED';
  const object = is ? after : before;
  if (object === undefined) return;
  write(response, type, { ...object, metadata: { ...object.metadata, resourceVersion: String(version) } });
}

function write(response: ServerResponse, type: EventType | 'BOOKMARK' | 'ERROR', object: unknown): void {
  response.write(`${JSON.stringify({ type, object })}\n`);
}

function status(response: ServerResponse, code: number, message: string): void {
  response.writeHead(code, { 'content-type': 'application/json' }).end(JSON.stringify(statusObject(code, message)));
}

function statusObject(code: number, message: string) {
  return { kind: 'Status', apiVersion: 'v1', metadata: {}, status: 'Failure', message, code };
}
