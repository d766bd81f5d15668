// On a page opened from the disk a browser starts no worker. There the search, which asks for one, runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = this.load(new URL(url, location.href))
      this.inside.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(new URL(one, url))), Promise.resolve())
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        this.inside.document.body.append(script)
      })
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
