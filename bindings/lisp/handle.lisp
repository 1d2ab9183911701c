;;;; Handles: their common part, how they are closed, and what happens to a handle that nobody closes.

(in-package #:pelton)

(defstruct (handle (:constructor nil) (:copier nil) (:predicate nil))
  "What pelton opens: a sender, receiver, client, service and so on. One thread at a time uses it, unless its docstring
says otherwise. CLOSE-HANDLE, or the WITH- macro that opened it, closes it."
  ;; The C handle; 0 once closed.
  (address 0 :type word)
  ;; It never sleeps: opened with :wait :spin.
  (spins nil)
  ;; Closes what is at the address, and returns as ATTEMPT. Must not refer to the handle.
  (shut #'shut :type function)
  ;; A WITH-RESERVED is open.
  (reserved nil)
  ;; A PEER-DIED-ERROR that the library has reported, perhaps once, and that nobody was signalled.
  (unsignalled nil))

(defmethod print-object ((handle handle) stream)
  (print-unreadable-object (handle stream :type t :identity t)
    (format stream "~:[closed~;open~]" (handle-open-p handle))))

(defmacro define-handle (name (&rest slots) documentation &key (parent 'handle))
  `(defstruct (,name (:include ,parent) (:constructor ,(name "%make-~a" name)) (:copier nil) (:predicate nil))
     ,documentation
     ,@slots))

(define-condition leaked-handle (warning)
  ((type :initarg :type :reader leaked-handle-type))
  (:documentation "A handle became garbage and was not closed. It is closed now. LEAKED-HANDLE-TYPE is its type.")
  (:report (lambda (condition stream)
             (format stream "pelton: a ~(~a~) became garbage and is closed now: use WITH-~:*~a, or CLOSE-HANDLE"
                     (leaked-handle-type condition)))))

(setf (documentation 'leaked-handle-type 'function) "The type of the handle that was not closed, a symbol.")

(defvar *handles* (make-hash-table :test 'eq :weakness :key :synchronized t) "All open handles.")

(defun shut (address)
  (attempt (%close address)))

(defun adopt (handle)
  "Has HANDLE closed when it becomes garbage, or when the image is saved. Only without interrupts."
  (let ((address (handle-address handle)) (shut (handle-shut handle)) (type (type-of handle)))
    (sb-ext:finalize handle
                     (lambda ()
                       (funcall shut address)
                       (warn 'leaked-handle :type type))
                     :dont-save t)
    (setf (gethash handle *handles*) t)
    handle))

(defun handle-open-p (handle)
  "Returns true until HANDLE is closed."
  (plusp (handle-address handle)))

(defun take-address (handle)
  "Takes the C handle of HANDLE, or 0, for the caller to close. Only without interrupts."
  (let ((address (handle-address handle)))
    (unless (zerop address)
      (setf (handle-address handle) 0)
      (sb-ext:cancel-finalization handle)
      (remhash handle *handles*))
    address))

(defun close-handle (handle)
  "Closes a handle of any kind, also after an error. Closing it again does nothing. No other thread may use it
meanwhile. Does not wait, except for appenders, which first flush everything to their sink. A sender's receiver gets
every message, and then the end. Signals a PELTON-ERROR, for instance SINK-ERROR for what the sink did not take; the
handle is closed anyway."
  (declare (type handle handle))
  (check (close-quietly handle))
  (values))

(defun close-quietly (handle)
  "As CLOSE-HANDLE, but returns as ATTEMPT."
  (without-interrupts
    (let ((address (take-address handle)))
      (if (zerop address) 0 (funcall (handle-shut handle) address)))))

(defvar *missing* nil "Why a saved image is without the library.")

(defmacro opening ((out &rest make) call)
  "Makes CALL, which writes a C handle to the SAP OUT. Returns the handle made by MAKE, or as ATTEMPT. Without
interrupts, so that no open handle is lost."
  (let ((result (gensym "RESULT")))
    `(with-words (,out 1)
       (check-library)
       (without-interrupts
         (let ((,result (result ,call)))
           (if (eql ,result +ok+)
               (adopt (,@make :address (sap-ref-64 ,out 0)))
               ,result))))))

(defun check-library ()
  (when *missing* (error "pelton: ~a" *missing*)))

(defmacro opening-in-steps ((kind name timeout &rest make) (sap structure &rest fields))
  "Opens a handle of KIND under NAME, with C options of STRUCTURE and FIELDS, without waiting in the library: interrupts
are served until the peer is there, and its handshake done. Waits up to TIMEOUT seconds; NIL does not wait for a peer
that is not there. Signals as the library, and TIMED-OUT with the restart WAIT-LONGER."
  (flet ((function-of (verb) (name "%~a-~a" kind verb)))
    (let ((opening (gensym "OPENING")) (out (gensym "OUT")) (result (gensym "RESULT")) (seconds (gensym "TIMEOUT")))
      `(let ((,seconds ,timeout))
         (persisting ()
           (let ((deadline-ns (and ,seconds (deadline-of ,seconds))))
             (with-words (,out 1)
               (check-library)
               (without-interrupts
                 (let ((,result (with-options (,sap ,structure deadline-ns ,@fields)
                                  (result (,(function-of 'open-start) ,name ,sap ,out)))))
                   (if (eql ,result +ok+)
                       (let ((,opening (sap-ref-64 ,out 0)))
                         (unwind-protect
                              (loop
                                (let ((,result (result (,(function-of 'opening-finish) ,opening ,out))))
                                  (cond ((eql ,result +ok+)
                                         (return (adopt (,@make :address (sap-ref-64 ,out 0)))))
                                        ((not (eql ,result +again+))
                                         (return ,result))))
                                ;; The descriptor becomes readable at the deadline, too.
                                (with-local-interrupts
                                  (wait-readable (,(function-of 'opening-fd) ,opening) +forever+)))
                           (%close ,opening)))
                       ,result))))))))))

(defmacro with-handle ((variable (open &rest arguments)) &body body)
  "Runs BODY with VARIABLE bound to the handle that OPEN returns, and closes it however BODY is left. Interrupts are
served while OPEN waits, and in BODY, and not in between. An error of closing is signalled if BODY ends normally, else
it is a warning."
  (let ((closed (gensym "CLOSED")) (ended (gensym "ENDED")) (given (gensym "ARGUMENTS")))
    `(let ((,given (list ,@arguments)) (,closed 0) (,ended nil))
       (multiple-value-prog1
           (without-interrupts
             (let ((,variable (allow-with-interrupts (apply #',open ,given))))
               (unwind-protect (with-local-interrupts (multiple-value-prog1 (progn ,@body) (setf ,ended t)))
                 (setf ,closed (close-quietly ,variable))
                 (unless (or ,ended (eql ,closed 0))
                   (warn "closing ~a: ~a" ,variable ,closed)))))
         (check ,closed)))))

;;; ---- Signalling, with restarts

(macrolet ((define-restarts (&rest restarts)
             `(progn
                ,@(loop for (restart documentation) in restarts
                        collect `(defun ,restart (&optional condition)
                                   ,(format nil "Invokes the restart ~a of CONDITION, if there is one: ~a~%~
                                                 For instance in HANDLER-BIND: ((pelton:pelton-error #'pelton:~(~a~)))."
                                            restart documentation restart)
                                   (let ((restart (find-restart ',restart condition)))
                                     (when restart (invoke-restart restart))))))))
  (define-restarts
    (wait-longer "after TIMED-OUT, waits as long again.")
    (resume-channel "after PEER-DIED-ERROR, waits for a successor of the peer, and continues with that.")
    (retry "after SINK-ERROR, NO-SPACE-ERROR or SYSTEM-ERROR, repeats the operation.")
    (drop-message "gives up sending, appending or submitting this message; the function returns NIL.")
    (skip-damage "after DAMAGED-ERROR in MAP-RECORD-FILE, continues after the damaged part.")))

(defun note (handle result)
  "Returns RESULT, or NIL if it says that the peer of HANDLE has died: that is noted in HANDLE, because an interrupt may
unwind before it is signalled."
  (if (typep result 'peer-died-error)
      (progn (setf (handle-unsignalled handle) result) nil)
      result))

(defun persist (function handle what)
  "Calls FUNCTION, which returns as ATTEMPT, and returns its code. Signals PELTON_AGAIN and lower codes with restarts;
all except DROP-MESSAGE call it again. HANDLE has what NOTE has noted, and a peer that can have a successor; or it is
NIL. WHAT names what DROP-MESSAGE leaves undone, with the result NIL; or it is NIL."
  (declare (type function function) (dynamic-extent function))
  (loop
    (let* ((result (or (and handle (handle-unsignalled handle)) (funcall function) (handle-unsignalled handle)))
           (condition (cond ((eql result +again+) (make-condition 'timed-out :code +again+))
                            ((typep result 'condition) result)
                            (t (return result)))))
      (when handle (setf (handle-unsignalled handle) nil))
      (restart-case (with-interrupts (error condition))
        (wait-longer ()
          :test (lambda (asked) (declare (ignore asked)) (typep condition 'timed-out))
          :report "Wait as long again.")
        (resume-channel ()
          :test (lambda (asked) (declare (ignore asked)) (and handle (typep condition 'peer-died-error)))
          :report "Wait for a successor of the peer."
          (resume handle))
        (retry ()
          :test (lambda (asked) (declare (ignore asked)) (typep condition '(or sink-error no-space-error system-error)))
          :report "Repeat the operation.")
        (drop-message ()
          :test (lambda (asked) (declare (ignore asked)) what)
          :report (lambda (stream) (format stream "Do not ~a it." what))
          (return nil))))))

(defmacro persisting ((&key handle what) &body body)
  "BODY returns as ATTEMPT: see PERSIST."
  `(flet ((body () ,@body))
     (declare (dynamic-extent #'body))
     (persist #'body ,handle ,what)))

;;; ---- What several kinds do

(defgeneric resume (handle &key timeout)
  (:documentation "After PEER-DIED-ERROR: waits up to TIMEOUT seconds until the peer of a sender, receiver or subscriber has a
successor, and continues with that; a sender's unreleased messages are delivered again. Returns HANDLE. An interrupt is
served within 50 ms. Signals TIMED-OUT with the restart WAIT-LONGER; REFUSED-ERROR: the peer is alive, or this channel
has no successors."))

(defgeneric sync (handle)
  (:documentation "Writes to the disk what a sender has sent, a receiver has released, or a flush or appenders have
flushed, after flushing what waits. Waits for the disk. Returns HANDLE. Signals REFUSED-ERROR for a channel that is not
a path's; for a flush or appenders as FLUSH."))

(defgeneric descriptor (handle)
  (:documentation "The file descriptor of a sender, receiver, client, service or engine, which
SB-SYS:WAIT-UNTIL-FD-USABLE and others may poll for reading."))

(defgeneric info (handle)
  (:documentation "Returns figures of a sender, receiver, client, service or engine: a property list with the fields of
the C structure, as :MESSAGES for pelton_sender_info.messages. Sizes are in bytes. For instance (getf (info sender)
:unreleased)."))

(defmacro define-figures (kind &optional (get `(,(name "%~a-get-info" kind) (handle-address handle) sap)))
  "Methods of DESCRIPTOR and INFO for handles of KIND. GET has C write the figures of HANDLE to SAP."
  (let ((structure (name "~a-info" kind)))
    `(progn
       (defmethod descriptor ((handle ,kind))
         ;; A handle that only the caller refers to must not become garbage meanwhile.
         (with-pinned-objects (handle)
           (check (attempt (,(name "%~a-fd" kind) (handle-address handle))))))
       (defmethod info ((handle ,kind))
         (with-structure (sap ,structure)
           (with-pinned-objects (handle)
             (check (attempt ,get)))
           (list ,@(loop for (field) in (cddr (assoc structure *structures*))
                         for value = `(,(name "~a.~a" structure field) sap)
                         unless (member field '(struct-bytes reserved))
                           append (list (intern (symbol-name field) '#:keyword)
                                        (if (eq field 'has-peer) `(eql ,value 1) value)))))))))

(defmacro define-resume (kind)
  `(defmethod resume ((handle ,kind) &key timeout)
     ;; The caller knows of the death.
     (setf (handle-unsignalled handle) nil)
     (persisting ()
       (attempt-waiting (nil nil timeout deadline)
         (,(name "%~a-resume" kind) (handle-address handle) deadline)))
     handle))

(defmacro define-resume-and-sync (kind)
  `(progn
     (define-resume ,kind)
     (defmethod sync ((handle ,kind))
       (check (attempt (,(name "%~a-sync" kind) (handle-address handle))))
       handle)))
