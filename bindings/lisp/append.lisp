;;;; Appending from many threads, and flushing: sinks, appenders, record files.

(in-package #:pelton)

;;; ---- Sinks

(defstruct (sink (:copier nil) (:predicate nil))
  "A sink that is a function in Lisp."
  (function #'identity :type function)
  ;; The condition that it was left by last, if any.
  (cause nil))

(defvar *sinks* (make-hash-table :synchronized t) "Those in use, by number.")
(declaim (type cons *next-sink*))
(sb-ext:defglobal *next-sink* (list 0))

(defstruct (chunks (:copier nil) (:predicate nil) (:constructor %make-chunks (address count)))
  "The argument of a sink: consecutive messages of some lanes, for DO-CHUNKS and DO-RECORDS. Valid until the sink
returns."
  (address 0 :type word)
  (count 0 :type (unsigned-byte 32)))

(defmacro do-chunks (((sap size &key messages first-seq lane-id pid uid) chunks &key result) &body body)
  "Runs BODY with each chunk: SIZE bytes at SAP, which are records of one lane, back to back; then returns RESULT. A
record is a little-endian word, number << 32 | size; the bytes; and up to 7 more, so that the next one begins at a
multiple of 8. The others are variables for the number of messages, the number of the first one, an integer that
identifies the lane among all that ever existed, and the process and user of the sender. BODY is in a block named NIL."
  (let ((at (gensym "AT")) (each (gensym "CHUNKS")) (chunk (gensym "CHUNK")))
    `(let ((,each ,chunks))
       (loop for ,at of-type word from (chunks-address ,each) by +sizeof-chunk+
             repeat (chunks-count ,each)
             do (let* ((,chunk (int-sap ,at))
                       (,sap (int-sap (chunk.bytes ,chunk)))
                       (,size (ldb (byte 62 0) (chunk.size ,chunk)))
                       ,@(when first-seq `((,first-seq (chunk.first-seq ,chunk))))
                       ,@(when messages `((,messages (chunk.messages ,chunk))))
                       ,@(when lane-id `((,lane-id (logior (sap-ref-64 (chunk.lane-id ,chunk) 0)
                                                           (ash (sap-ref-64 (chunk.lane-id ,chunk) 8) 64)))))
                       ,@(when pid `((,pid (chunk.pid ,chunk))))
                       ,@(when uid `((,uid (chunk.uid ,chunk)))))
                  (declare (ignorable ,sap ,size))
                  ,@body)
             finally (return ,result)))))

(defmacro do-records (((sap size &key seq) chunks &key result) &body body)
  "Runs BODY with each message of all chunks, in order: SIZE bytes at SAP, and its number; then returns RESULT. Signals
CORRUPT-ERROR for an invalid record, which only a sender in another process can cause. BODY is in a block named NIL.

    (pelton:with-appenders (appenders (lambda (chunks)
                                        (pelton:do-records ((sap size) chunks) (write-out sap size))))
      (pelton:append-message appenders octets))"
  (let ((bytes (gensym "BYTES")) (end (gensym "END")) (at (gensym "AT"))
        (header (gensym "HEADER")) (next (gensym "NEXT"))
        (first (gensym "FIRST")) (records (gensym "RECORDS")))
    `(do-chunks ((,bytes ,end :first-seq ,first) ,chunks :result ,result)
       (let ((,at 0) (,next ,first))
         (declare (type (unsigned-byte 62) ,at) (type (unsigned-byte 32) ,next))
         ;; Named, so that the block named NIL is the one around it.
         (loop named ,records
               while (< ,at ,end)
               do (when (< (- ,end ,at) 8) (invalid-record))
                  ;; Loaded once: the sender could change it.
                  (let* ((,header (sap-ref-64 ,bytes ,at))
                         (,size (ldb (byte 32 0) ,header))
                         (,sap (sap+ ,bytes (+ ,at 8))))
                    (declare (ignorable ,sap))
                    (unless (and (= (ldb (byte 32 32) ,header) ,next) (<= ,size (- ,end ,at 8)))
                      (invalid-record))
                    (setf ,at (+ ,at 8 (logandc2 (+ ,size 7) 7)))
                    (let (,@(when seq `((,seq ,next))))
                      ,@body)
                    (setf ,next (if (= ,next #xffffffff) 1 (1+ ,next)))))))))

(defun invalid-record ()
  (error 'corrupt-error :code +corrupt+ :detail "a record of a chunk is invalid: its sender wrote it after the commit"))

(define-alien-callable write-to-sink int ((context unsigned-long) (chunks unsigned-long) (count unsigned-long))
  (call-sink context chunks count))

(defun call-sink (number address count)
  "Calls the sink with the chunks. Returns 0, or less if it was left in another way: nothing unwinds through the
library."
  (let ((sink (gethash number *sinks*)) (left t) (eio 5))
    (setf (sink-cause sink) nil)
    (block nil
      (without-interrupts
        (unwind-protect
             (handler-case
                 (progn
                   (funcall (sink-function sink) (%make-chunks address count))
                   (setf left nil))
               (serious-condition (condition)
                 (setf (sink-cause sink) condition)))
          (return (if left (- eio) 0)))))))

(deftype foreign-sink ()
  "A C function, pelton_write of pelton/flush.h, and its context."
  '(cons system-area-pointer word))

(defstruct (record-file (:copier nil) (:constructor %make-record-file))
  "A sink that is a file: the function RECORD-FILE."
  path rotate-bytes sync-bytes sync-interval)

(defun record-file (path &key rotate-bytes sync-bytes sync-interval)
  "Returns a sink that writes a record file, which MAP-RECORD-FILE and the command `pelton cat` read. Opening it creates
the file, or continues it after cutting off the torn end of a killed writer.
:ROTATE-BYTES a write beyond this size begins a new file; the old one is renamed to PATH.000001 and so on.
:SYNC-BYTES fdatasync after each such number of bytes, without waiting; :EACH-WRITE before each write counts as done.
:SYNC-INTERVAL fdatasync so many seconds after a write.

    (pelton:open-appenders (pelton:record-file \"log\" :sync-interval 1))"
  (%make-record-file :path path :rotate-bytes rotate-bytes :sync-bytes sync-bytes :sync-interval sync-interval))

(defun open-to-sink (sink made open-to-function open-to-file)
  "Returns the handle of OPEN-TO-FUNCTION, which gets SAPs of a C function and its context, or of OPEN-TO-FILE, which
gets a path and a SAP of C options; both may also return as ATTEMPT. MADE is the SINK of a function in Lisp, else NIL."
  (etypecase sink
    (function
     (let ((number (sb-ext:atomic-incf (car *next-sink*))) (opened nil))
       (setf (gethash number *sinks*) made)
       (unwind-protect
            (setf opened (funcall open-to-function (alien-sap (alien-callable-function 'write-to-sink))
                                   (int-sap number)))
         (unless (typep opened 'handle) (remhash number *sinks*)))
       (check opened)))
    (foreign-sink
     (check (funcall open-to-function (car sink) (int-sap (cdr sink)))))
    (record-file
     (with-accessors ((path record-file-path) (rotate-bytes record-file-rotate-bytes) (sync record-file-sync-bytes)
                      (interval record-file-sync-interval))
         sink
       (let ((sync-bytes (if (eq sync :each-write) +each-write+ sync))
             (sync-interval-ns (and interval (seconds-to-ns interval))))
         (with-options (file record-file-options rotate-bytes sync-bytes sync-interval-ns)
           (check (funcall open-to-file (native path) file))))))))

;;; ---- Appending
;;;
;;; A thread finds its appender in a table by hashing, without a lock. An entry never changes, and no place becomes
;;; empty, so a search from the hash on finds it. A new thread stores its own, under the lock, in a place that is empty
;;; or whose thread has ended. Half of the places stay free: the library has at most 1,024 appenders.

(defstruct (own (:include handle) (:copier nil) (:predicate nil) (:constructor make-own (thread address sink)))
  "A thread's appender; its thread is NIL if that has ended. Its address is 0 once the appenders are closed."
  (thread nil :read-only t)
  (sink nil :read-only t))

(defconstant +places-bits+ 11)
(defconstant +places+ (ash 1 +places-bits+))

(define-handle appenders ((places (make-array +places+ :initial-element nil) :type (simple-vector #.+places+))
                          (lock (sb-thread:make-mutex :name "pelton appenders") :type sb-thread:mutex)
                          (sink nil :type (or null sink)))
  "Appends from any thread at any time: OPEN-APPENDERS. Each thread has a buffer of its own, which is created when it
first appends, and closed after its end by the next new thread or the next FLUSH.")

(define-handle flush ((sink nil :type (or null sink)))
  "Passes everything that a receiver receives to a sink: OPEN-FLUSH.")

(declaim (inline first-place))
(defun first-place ()
  "The place to search first: the thread's structure stays where it is, and no two threads share one."
  (ldb (byte +places-bits+ (- 64 +places-bits+))
       (ldb (byte 64 0) (* (the word (sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-this-slot)))
                           #x9e3779b97f4a7c15))))

(defun search-appender (places place)
  "The calling thread's appender, from PLACE on, or NIL."
  (declare (type (simple-vector #.+places+) places) (type (unsigned-byte 16) place))
  ;; In time every place may have been used.
  (loop repeat +places+
        do (let ((own (svref places place)))
             (cond ((null own) (return nil))
                   ((eq (own-thread own) sb-thread:*current-thread*) (return own))))
           (setf place (logand (1+ place) (1- +places+)))))

(declaim (inline own-appender))
(defun own-appender (appenders)
  "The calling thread's appender, or NIL."
  (declare (type appenders appenders))
  (let* ((places (appenders-places appenders)) (place (first-place)) (own (svref places place)))
    ;; The places have nothing else, and it is usually in the first one.
    (sb-ext:truly-the (or null own)
                      (if (and own (eq (own-thread (sb-ext:truly-the own own)) sb-thread:*current-thread*))
                          own
                          (search-appender places place)))))

(defun join (appenders)
  "Creates the calling thread's appender. Returns it, or as ATTEMPT."
  (let ((places (appenders-places appenders)))
    (without-interrupts
      (sb-thread:with-mutex ((appenders-lock appenders))
        (reap places)
        (with-words (out 1)
          (let ((result (result (%appenders-appender (handle-address appenders) out))))
            (if (eql result +ok+)
                (loop with own = (make-own sb-thread:*current-thread* (sap-ref-64 out 0) (appenders-sink appenders))
                      for place = (first-place) then (logand (1+ place) (1- +places+))
                      for found = (svref places place)
                      when (or (null found) (null (own-thread found)))
                        do (return (setf (svref places place) own)))
                result)))))))

(defun reap (places)
  "Closes the appenders of threads that have ended. Only under the lock."
  (loop for place from 0 below +places+
        for own = (svref places place)
        when (and own (own-thread own) (not (sb-thread:thread-alive-p (own-thread own))))
          do (setf (svref places place) (load-time-value (make-own nil 0 nil)))
             (close-own own)))

(defun close-own (own)
  (let ((address (shiftf (handle-address own) 0)))
    (unless (zerop address) (attempt (%close address)))))

(defun shut-appenders (places ticker number sink)
  "Returns the function that closes appenders with these places; TICKER has the function that ends their thread, and
NUMBER is the number of SINK; each may be NIL."
  (lambda (address)
    (when (car ticker) (funcall (car ticker)))
    ;; Closing alone would not report what the sink refuses.
    (let ((synced (with-cause (attempt (%appenders-sync address)) sink))
          ;; This thread has left WITH-APPENDERS to exit, while others may still append.
          (exiting sb-impl::*exit-in-progress*))
      (loop for own across places
            when (and own (own-thread own)
                      (or (not exiting)
                          (eq (own-thread own) sb-thread:*current-thread*)
                          (not (sb-thread:thread-alive-p (own-thread own)))))
              do (close-own own))
      (let ((closed (attempt (%close address))))
        (when (and number (not exiting)) (remhash number *sinks*))
        (if (eql synced +ok+) closed synced)))))

(defun start-ticker (appenders interval)
  "Starts a thread that flushes every INTERVAL seconds. Returns the function that ends it."
  (let* ((end (sb-thread:make-semaphore)) (pointer (sb-ext:make-weak-pointer appenders))
         (thread (sb-thread:make-thread
                  (lambda ()
                    (loop until (sb-thread:wait-on-semaphore end :timeout interval)
                          do (let ((appenders (sb-ext:weak-pointer-value pointer)))
                               (unless appenders (return))
                               (handler-case (flush appenders)
                                 ;; The next flush passes the same to the sink.
                                 (pelton-error (condition)
                                   (when (handle-open-p appenders) (warn "~a" condition)))))))
                  :name "pelton flush")))
    (lambda ()
      (sb-thread:signal-semaphore end)
      (unless (eq thread sb-thread:*current-thread*)
        (sb-thread:join-thread thread :default nil)))))

;; So that the compiler knows the type of a variable that has them: WITH-RESERVED is then inlined for appenders alone.
(declaim (ftype (function (t &key (:flush-bytes t) (:flush-interval t) (:appenders-max t) (:message-bytes-max t))
                          (values appenders &optional))
                open-appenders))
(defun open-appenders (sink &key (flush-bytes (ash 1 20)) (flush-interval nil flush-interval-p) appenders-max
                              message-bytes-max)
  "Opens APPENDERS: each thread that appends has a buffer of :FLUSH-BYTES bytes, and passes it to SINK itself when it is
full. A message also has a header of 8 bytes. Does not wait.
SINK is
  a function of CHUNKS, which DO-CHUNKS and DO-RECORDS iterate over. When it returns, it has them all. If it is left in
    another way, it has none: the next flush passes the same chunks again, and the flushing function signals SINK-ERROR.
    One
    thread at a time calls it, without interrupts. It must not use these appenders, or wait for a thread that does;
  a RECORD-FILE; or
  (SAP . WORD), a C function, pelton_write of pelton/flush.h, and its context.
:FLUSH-INTERVAL seconds after which a message is flushed, 0.1; NIL never by time, which is the default for a function in
Lisp, because the library's own thread cannot run Lisp: there a thread of Lisp flushes at this interval.
:APPENDERS-MAX threads at a time, 1,024. :MESSAGE-BYTES-MAX bytes of the largest message, a buffer less 16 bytes.
Signals OPTION-ERROR, SYSTEM-ERROR, and for a record file ROLE-TAKEN-ERROR, DAMAGED-ERROR and others.

    (pelton:with-appenders (appenders (pelton:record-file \"log\"))
      (pelton:append-message appenders octets)
      (pelton:flush appenders))"
  (check-type flush-interval (or null (real (0))))
  (let* ((made (when (functionp sink) (make-sink :function sink)))
         (flush-interval-ns (cond (made +forever+)
                                  (flush-interval (seconds-to-ns flush-interval))
                                  (flush-interval-p +forever+)))
         (places (make-array +places+ :initial-element nil))
         (ticker (list nil)))
    (with-options (options appenders-options appenders-max flush-bytes message-bytes-max flush-interval-ns)
      (flet ((make (number address)
               (%make-appenders :address address :places places :sink made
                                :shut (shut-appenders places ticker number made))))
        (let ((appenders (open-to-sink
                          sink made
                          (lambda (write context)
                            (flet ((make (&key address) (make (and made (sap-int context)) address)))
                              (opening (out make) (%appenders-to-function write context options out))))
                          (lambda (path file)
                            (flet ((make (&key address) (make nil address)))
                              (opening (out make) (%appenders-to-record-file path file options out)))))))
          (when (and made flush-interval)
            (unwind-protect (setf (car ticker) (start-ticker appenders flush-interval))
              (unless (car ticker) (close-quietly appenders))))
          appenders)))))

(defmacro with-appenders ((appenders sink &rest options) &body body)
  "Runs BODY with the APPENDERS that OPEN-APPENDERS returns. However BODY is left, they are flushed and closed; an error
of the sink is signalled if BODY ends normally, else it is a warning. Threads that use them must have ended by then."
  `(with-handle (,appenders (open-appenders ,sink ,@options)) ,@body))

(defun with-cause (result from)
  "Returns RESULT; a SINK-ERROR gets the cause of the sink of FROM, a handle or a SINK, or NIL."
  (when (typep result 'sink-error)
    (let ((sink (typecase from
                  (appenders (appenders-sink from))
                  (flush (flush-sink from))
                  (own (own-sink from))
                  (sink from))))
      (when sink (setf (slot-value result 'cause) (sink-cause sink)))))
  result)

(defun append-slowly (appenders address size tried)
  "As APPEND-MESSAGE, for SIZE bytes at ADDRESS. TRIED is the first result, or NIL."
  (declare (type appenders appenders) (type word address) (type (unsigned-byte 62) size))
  (when (and (typep tried 'reserved-error) (abort-abandoned (own-appender appenders)))
    (setf tried nil))
  (and (persisting (:what "append")
         (with-cause (or (shiftf tried nil)
                         (let ((own (or (own-appender appenders) (join appenders))))
                           (if (typep own 'own)
                               (attempt (%appender-append (handle-address own) (int-sap address) size))
                               own)))
           appenders))
       t))

(declaim (inline append-sap))
(defun append-sap (appenders sap size)
  "As APPEND-MESSAGE, for SIZE bytes at SAP, a system area pointer."
  (declare (type system-area-pointer sap) (type (unsigned-byte 62) size))
  (let* ((own (own-appender appenders))
         (tried (if own
                    (let ((address (handle-address own)))
                      (briefly (%appender-append address sap size)))
                    nil)))
    (or (eql tried +ok+)
        (append-slowly appenders (sap-int sap) size tried))))

(declaim (inline append-message))
(defun append-message (appenders octets &key (start 0) end)
  "Appends the bytes of OCTETS from START to END as one message to the calling thread's own buffer: no lock, no system
call, and nothing is consed. Waits only if the buffer is full: this thread passes it to the sink, and waits for that and
for another thread that flushes. The sink gets the messages of one thread in order. Returns true. Any thread, at any
time. Signals TOO-LARGE-ERROR; REFUSED-ERROR: too many threads; of the sink SINK-ERROR, NO-SPACE-ERROR, SYSTEM-ERROR:
then this message was not appended, and earlier ones are kept. Restarts: RETRY, and DROP-MESSAGE, which returns NIL."
  (with-octets-at (sap size) (octets start end)
    (append-sap appenders sap size)))

;;; A reservation in an appender needs no cleanup if the body is left otherwise: the library publishes a message only
;;; when it is committed, and the next reservation replaces one that was abandoned. So a thread only records, by a
;;; binding, which of its reservations are open. That is undone by every exit, also by an interrupt that unwinds at any
;;; moment. An UNWIND-PROTECT beside a binding would take as long as the rest: it loads the binding stack's pointer as
;;; half of 16 bytes, which the processor cannot forward from the store of 8 bytes that the binding has just made.

(declaim (type list *reserving*))
(defvar *reserving* '() "The appenders of this thread in which a WITH-RESERVED is open: a list of OWN.")

(defun abort-abandoned (own)
  "Aborts what OWN has reserved. Returns NIL, and does nothing, if that WITH-RESERVED is still open."
  (unless (member own *reserving* :test #'eq)
    (without-interrupts (%appender-abort (handle-address own)))
    t))

(defun joined-appender (appenders)
  (persisting (:what "append")
    (with-cause (join appenders) appenders)))

(defun reserve-space-slowly (own size at tried)
  "Reserves SIZE bytes, and writes their address to AT. Waits and signals: true, or NIL by DROP-MESSAGE. TRIED is the
first result."
  (declare (type own own) (type (unsigned-byte 62) size at))
  (persisting (:what "append")
    (with-cause (or (shiftf tried nil)
                    (attempt (%appender-reserve (handle-address own) size (int-sap at))))
      own)))

(defmacro appending-reserved ((appenders wanted) write)
  "WITH-RESERVED of APPENDERS, a variable, for WANTED bytes, another one. WRITE is a function of the address of two
words: where the space is, and, written by it, how many bytes are the message."
  (let ((own (gensym "OWN")) (address (gensym "ADDRESS")) (words (gensym "WORDS")) (at (gensym "AT"))
        (tried (gensym "TRIED")) (open (gensym "OPEN")))
    `(let ((,own (or (own-appender ,appenders) (joined-appender ,appenders))))
       ;; NIL by DROP-MESSAGE.
       (when ,own
         (when (and *reserving* (member (the own ,own) *reserving* :test #'eq)) (refuse-reserving))
         (let* ((,address (handle-address (the own ,own)))
                (,open (cons ,own *reserving*))
                (*reserving* ,open))
           (declare (dynamic-extent ,open))
           (with-words (,words 2)
             (let* ((,at (ldb (byte 62 0) (sap-int ,words)))
                    (,tried (briefly (%appender-reserve ,address ,wanted ,words))))
               (when (or (eql ,tried +ok+)
                         (reserve-space-slowly ,own ,wanted ,at ,tried))
                 (multiple-value-prog1 (,write ,at)
                   (let* ((,wanted (ldb (byte 62 0) (sap-ref-64 ,words 8)))
                          (,tried (briefly (%appender-commit ,address ,wanted))))
                     (unless (eql ,tried +ok+) (check ,tried))))))))))))

;;; ---- Flushing

(defun flush (handle)
  "Passes everything that APPENDERS or a FLUSH have to the sink. Of appenders that is every message whose append has
returned, in any thread; any thread may call it at any time. Waits for the sink. Returns true, or, for a flush, NIL once
no sender is left. Signals SINK-ERROR, or for a record file NO-SPACE-ERROR, SYSTEM-ERROR: everything is kept, and comes
again."
  (etypecase handle
    (appenders
     (check (with-cause (attempt (%appenders-flush (handle-address handle))) handle))
     (without-interrupts
       (sb-thread:with-mutex ((appenders-lock handle))
         (reap (appenders-places handle))))
     t)
    (flush
     (let ((result (with-cause (attempt (%flush-flush (handle-address handle))) handle)))
       (unless (typep result 'closed-error)
         (check result)
         t)))))

(defmethod sync ((handle appenders))
  (check (with-cause (attempt (%appenders-sync (handle-address handle))) handle))
  handle)

(defmethod sync ((handle flush))
  (check (with-cause (attempt (%flush-sync (handle-address handle))) handle))
  handle)

(defun open-flush (receiver sink &key (flush-bytes (ash 1 20)) (flush-interval 1/10))
  "Opens a FLUSH, which passes what RECEIVER receives to SINK while RUN-FLUSH runs: once :FLUSH-BYTES wait, or
:FLUSH-INTERVAL seconds after a message came; NIL, once nothing more is there. Sinks as OPEN-APPENDERS. A message is
released when the sink has it. The receiver's handle is closed: it becomes part of the flush; after an error it is
unchanged. Does not wait. Conditions as OPEN-APPENDERS."
  (declare (type receiver receiver))
  (check-type flush-interval (or null (real (0))))
  (let ((made (when (functionp sink) (make-sink :function sink)))
        (flush-interval-ns (if flush-interval (seconds-to-ns flush-interval) +forever+)))
    (with-options (options flush-options flush-bytes flush-interval-ns)
      (flet ((make (number address)
               (take-address receiver)
               (%make-flush :address address :sink made
                            :shut (lambda (address)
                                    (prog1 (attempt (%close address))
                                      (when number (remhash number *sinks*)))))))
        (open-to-sink
         sink made
         (lambda (write context)
           (flet ((make (&key address) (make (and made (sap-int context)) address)))
             (opening (out make) (%flush-to-function (handle-address receiver) write context options out))))
         (lambda (path file)
           (flet ((make (&key address) (make nil address)))
             (opening (out make) (%flush-to-record-file (handle-address receiver) path file options out)))))))))

(defmacro with-flush ((flush receiver sink &rest options) &body body)
  "Runs BODY with the FLUSH that OPEN-FLUSH returns, and closes it however BODY is left."
  `(with-handle (,flush (open-flush ,receiver ,sink ,@options)) ,@body))

(defun run-flush (flush &key timeout)
  "Flushes until no sender is left, then syncs and returns true; or until TIMEOUT seconds have passed, then returns NIL.
An interrupt is served within 50 ms. Signals SINK-ERROR and the record file's errors with the restart RETRY, others as
RECEIVE. It can be called again."
  (declare (type flush flush))
  (loop
    (let ((result (attempt-waiting (nil nil timeout deadline)
                    (%flush-run (handle-address flush) deadline))))
      (cond ((eql result +ok+) (return t))
            ((eql result +again+) (return nil)))
      (restart-case (error (with-cause result flush))
        (retry () :report "Repeat the operation.")))))

;;; ---- Record files

(define-handle records ()
  "Reads a record file.")

(defun open-records (path)
  (check (opening (out %make-records) (%records-open (native path) out))))

(defun map-record-file (function path)
  "Calls FUNCTION with each message of a record file, a fresh vector of its bytes, and its number, in the order of
writing. Every checksum is verified. Waits only for the disk. Returns :END, or :TORN if the last record is not whole:
its writer was killed, or is writing now. Signals DAMAGED-ERROR for a damaged part, with the restart SKIP-DAMAGE, which
continues after it; LATER-VERSION-ERROR if the file continues in a later version, after the messages before;
NOT-A-RECORD-FILE-ERROR, SYSTEM-ERROR.

    (pelton:map-record-file (lambda (octets seq) (format t \"~d: ~d bytes~%\" seq (length octets))) \"log\")"
  (let ((function (coerce function 'function)))
    (with-handle (records (open-records path))
      (with-structure (record record)
        (loop
          (let ((result (attempt (%records-next (handle-address records) record))))
            (typecase result
              ((eql #.+ok+)
               (funcall function
                        (sap-octets (int-sap (record.data record)) (ldb (byte 62 0) (record.size record)))
                        (record.seq record)))
              ((eql #.+again+) (return :end))
              (torn-error (return :torn))
              (damaged-error (restart-case (error result)
                               (skip-damage () :report "Continue after the damaged part.")))
              (not-a-record-file-error (error 'later-version-error :code (pelton-error-code result)
                                                                   :detail (pelton-error-detail result)))
              (t (error result)))))))))
